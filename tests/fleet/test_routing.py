"""Where requests go: to their context, to another replica where that costs less, and never all to one."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from jinfercept.fleet.conversations import KeyedPrefix, RoutingHint
from jinfercept.fleet.routing import PLACED_HALF_LIFE_S, NoReplicaError, ReplicaState, Router
from jinfercept.sched.named_profiles import load_profile

PROFILE = load_profile("paper-gptj-6b-a100")
SYSTEM_TOKENS = 2000


def fleet(count: int) -> tuple[ReplicaState, ...]:
    return tuple(ReplicaState(f"r{number}") for number in range(count))


def turn(session: int, number: int, *, named: bool = False, tenant: str = "", each: int = 200) -> RoutingHint:
    """The hint of a session's turn: a system prompt that all share, and two messages more in each turn."""
    marks = ["system"] + [f"{session} {place}" for place in range(2 * number + 1)]
    prefixes = [KeyedPrefix(mark.encode().ljust(16), SYSTEM_TOKENS + each * place) for place, mark in enumerate(marks)]
    name = f"n{session}".encode() if named else None
    tokens = prefixes[-1].tokens
    return RoutingHint(tenant, name, None, prefixes[1].key, tuple(reversed(prefixes)), tokens)


def play(router: Router, replicas, sessions: int, turns: int, gap_s: float = 1.0, named: bool = False):
    """Interleaved sessions; returns the routes by session."""
    rng, now, routes = random.Random(0), 0.0, [[] for _ in range(sessions)]
    for number in range(turns):
        for session in rng.sample(range(sessions), sessions):
            now += gap_s
            hint = turn(session, number, named=named)
            route = router.route(hint, replicas, now)
            routes[session].append(route)
            router.finished(hint, route.replica, hint.prompt_tokens, 20)
    return routes


@pytest.mark.parametrize("named", [False, True])
def test_sessions_stay_where_their_context_is_and_spread_over_the_fleet(named):
    routes = play(Router(PROFILE), fleet(4), 64, 6, named=named)
    homes = [{route.replica for route in session} for session in routes]
    assert all(len(home) == 1 for home in homes)
    counts = Counter(name for home in homes for name in home)
    assert set(counts.values()) == {16}
    assert {route.reason for session in routes for route in session[1:]} == {"session" if named else "conversation"}


def test_a_shared_prefix_is_copied_deliberately_and_then_used_by_all_that_hold_it():
    routes = play(Router(PROFILE), fleet(4), 64, 1, gap_s=20.0)
    reasons = Counter(session[0].reason for session in routes)
    assert reasons == {"load": 1, "spread": 3, "prefix": 60}
    assert all(session[0].found_tokens == SYSTEM_TOKENS for session in routes if session[0].reason == "prefix")


def test_a_conversation_moves_when_waiting_costs_more_than_recomputing():
    router, replicas = Router(PROFILE), fleet(2)
    home = router.route(turn(1, 0), replicas, 0.0).replica
    held_s = PROFILE.recompute_s(SYSTEM_TOKENS, 512)
    busy = [replace(replica, queue_s=0.5 * held_s if replica.name == home else 0.0, at_s=1.0) for replica in replicas]
    assert router.route(turn(1, 1), busy, 1.0).replica == home
    busy = [replace(replica, queue_s=5.0 if replica.name == home else 0.0, at_s=2.0) for replica in replicas]
    moved = router.route(turn(1, 2), busy, 2.0)
    assert (moved.reason, moved.replica != home) == ("moved", True)
    assert router.route(turn(1, 3), replicas, 100.0).replica == moved.replica  # the longer context is there


def test_work_sent_since_a_report_counts_until_the_next_one_and_is_worked_off():
    router, (replica,) = Router(PROFILE), fleet(1)
    prompt_s = PROFILE.recompute_s(turn(1, 0).prompt_tokens, 512)
    first = router.route(turn(1, 0), [replica], 0.0)
    assert first.price_s == pytest.approx(prompt_s, rel=0.05)
    second = router.route(turn(2, 0, each=1000), [replica], 0.0)
    assert second.price_s > prompt_s
    reported = replace(replica, queue_s=1.0, at_s=0.0)  # of the same time: what was sent by then is in it
    third = router.route(turn(3, 0, each=1000), [reported], 0.0)
    assert third.price_s == pytest.approx(1.0 + second.price_s - first.price_s, rel=0.05)
    assert router.route(turn(4, 0), [reported], 50.0).price_s < prompt_s


def test_replicas_that_do_not_accept_get_nothing():
    router, replicas = Router(PROFILE), [*fleet(3)]
    home = router.route(turn(1, 0, named=True), replicas, 0.0).replica
    draining = [replace(replica, accepts=replica.name != home) for replica in replicas]
    for number in range(1, 5):
        assert router.route(turn(1, number, named=True), draining, float(number)).replica != home
    with pytest.raises(NoReplicaError):
        router.route(turn(1, 5), [replace(replica, accepts=False) for replica in replicas], 9.0)
    with pytest.raises(NoReplicaError):
        router.route(turn(1, 5), (), 9.0)


def test_a_replica_that_died_holds_nothing_even_under_its_old_name():
    router, replicas = Router(PROFILE), fleet(2)
    home = router.route(turn(1, 0), replicas, 0.0).replica
    router.forget_replica(home)
    again = router.route(turn(1, 1), replicas, 1.0)
    assert (again.reason, again.found_tokens) == ("load", 0)


def test_the_context_of_a_conversation_grows_and_that_of_a_response_does_not():
    router, replicas, found_tokens = Router(PROFILE), fleet(3), {True: list[int](), False: list[int]()}
    for grows, counts in found_tokens.items():
        hint = RoutingHint(follows=b"conversation" if grows else b"response", grows=grows, prompt_tokens=10)
        first = turn(int(grows), 0)
        home = router.route(first, replicas, 0.0).replica
        router.finished(first, home, 1000, 0, response_key=hint.follows)
        for number in range(1, 4):
            route = router.route(hint, replicas, 10.0 * number)
            router.finished(hint, route.replica, 1000 * (number + 1), 0, response_key=f"{grows} {number}".encode())
            counts.append(route.found_tokens)
    assert found_tokens == {True: [1000, 2000, 3000], False: [1000, 1000, 1000]}


def test_a_name_that_many_conversations_share_does_not_draw_them_all_to_one_replica():
    router, replicas, homes = Router(PROFILE), fleet(4), Counter()
    for session in range(40):
        hint = replace(turn(session, 0), named=b"the application")
        route = router.route(hint, replicas, 10.0 * session)
        router.finished(hint, route.replica, hint.prompt_tokens, 10)
        homes[route.replica] += 1
    assert max(homes.values()) <= 13


def test_a_full_pool_has_lost_the_contexts_used_last_of_all():
    router, replicas = Router(PROFILE, pool_tokens=7000), fleet(1)
    for session, number in ((1, 0), (2, 0), (1, 1)):
        hint = turn(session, number)
        router.route(hint, replicas, 0.0)
        router.finished(hint, "r0", hint.prompt_tokens, 10)
    hint = turn(3, 0)
    router.route(hint, replicas, 1e6)
    router.finished(hint, "r0", 3000, 10)  # more than the pool has left
    assert router.route(turn(2, 1), replicas, 2e6).reason != "conversation"
    assert router.route(turn(1, 2), replicas, 2e6).reason == "conversation"


def test_one_tenant_cannot_push_out_the_keys_of_others():
    router, replicas = Router(PROFILE, most_conversations=100), fleet(2)
    modest = [turn(session, 0, tenant="modest") for session in range(10)]
    homes = [router.route(hint, replicas, 0.0).replica for hint in modest]
    for session in range(3000):
        router.route(turn(session, 0, tenant="greedy"), replicas, 1.0)
    assert router.num_known <= 400
    for hint, home in zip(modest, homes, strict=True):
        assert router.route(hint, replicas, 1e6).replica == home


def test_keys_are_bounded_with_many_tenants_too():
    router, replicas = Router(PROFILE, most_conversations=25), fleet(2)
    for number in range(1000):
        router.route(turn(number, 0, tenant=f"t{number % 300}"), replicas, 1.0)
        assert router.num_known <= 100
    assert router.num_known > 90


def test_large_fleets_find_contexts_and_spread():
    router, replicas = Router(PROFILE), fleet(500)
    routes = play(router, replicas, 300, 3, gap_s=0.2)
    assert all(len({route.replica for route in session}) == 1 for session in routes)
    assert max(Counter(session[0].replica for session in routes).values()) <= 4


def test_a_failed_request_leaves_no_context_behind():
    router, replicas = Router(PROFILE), fleet(2)
    hint = turn(1, 0)
    home = router.route(hint, replicas, 0.0).replica
    router.failed(hint, home)
    assert router.route(hint, replicas, PLACED_HALF_LIFE_S).found_tokens == SYSTEM_TOKENS
