"""Simulated fleets: the router beside other ways of routing, and the coarse replica beside the engine."""

from collections.abc import Callable
from random import Random

import pytest

from benchmarks.fleet_sessions import SYSTEM_TOKENS, AgentSession, draw_sessions, first_turn
from benchmarks.routing_policies import ROUTING_POLICIES
from benchmarks.simulated_fleet import ClusterReport, play_cluster
from benchmarks.simulated_replicas import CoarseReplica, SteppedReplica, prompt_of
from jinfercept.meter.turns import LIMITS
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import Script, Segment

PROFILE = load_profile("paper-gptj-6b-a100-attention")
SIMULATION = Simulation(
    PROFILE, "copy_ahead", kv_tokens=80_000, host_tokens=300_000, max_model_len=16_384, prefix_caching=True
)


def agents(rng: Random) -> Callable[[], Script]:
    def draw() -> Script:
        turns = [Segment(rng.randint(4, 12), rng.expovariate(1 / 3), rng.randint(50, 300)) for _ in range(5)]
        return Script("agent", rng.randint(100, 400), (*turns, Segment(8, None, 0)))

    return draw


def play(policy: str, *, coarse: bool, replicas: int = 4) -> ClusterReport:
    sessions = list(draw_sessions(agents, 8.0, 20.0, 0, SYSTEM_TOKENS))[:32]
    members = [CoarseReplica(SIMULATION) if coarse else SteppedReplica(SIMULATION) for _ in range(replicas)]
    return play_cluster(members, ROUTING_POLICIES[policy](PROFILE, 0), sessions, LIMITS)


@pytest.fixture(scope="module")
def stepped() -> dict[str, ClusterReport]:
    return {name: play(name, coarse=False) for name in ("router", "random", "prefix_hash")}


def test_the_router_finds_what_is_known_where_random_and_hashed_routing_do_not_or_overload_one(stepped):
    router, random, hashed = stepped["router"], stepped["random"], stepped["prefix_hash"]
    assert all(report.turns == 32 * 6 and report.unfinished == 0 for report in stepped.values())
    assert router.known_share > 0.98
    assert router.home_share > 0.97
    assert router.busiest_share < 0.35
    assert 0.15 < random.home_share < 0.35
    assert random.known_share < 0.9
    assert hashed.busiest_share == 1.0
    assert router.turn_s[0] < min(random.turn_s[0], hashed.turn_s[0])


def test_the_coarse_replica_is_near_the_engine(stepped):
    coarse = play("router", coarse=True)
    assert coarse.known_share == pytest.approx(stepped["router"].known_share, abs=0.02)
    assert coarse.turn_s[0] == pytest.approx(stepped["router"].turn_s[0], rel=0.15)
    assert coarse.first_token_s[0] == pytest.approx(stepped["router"].first_token_s[0], rel=0.3)


def test_a_run_ends_after_its_most_seconds_and_counts_what_is_unfinished():
    sessions = draw_sessions(agents, 20.0, 20.0, 0, SYSTEM_TOKENS)
    report = play_cluster(
        [CoarseReplica(SIMULATION)], ROUTING_POLICIES["round_robin"](PROFILE, 0), sessions, LIMITS, 5.0
    )
    assert report.unfinished > 0
    assert report.seconds <= 5.0
    assert report.good_share < 1.0


def test_contexts_that_no_longer_fit_are_computed_again():
    small = Simulation(PROFILE, "copy_ahead", kv_tokens=17_000, host_tokens=0, max_model_len=16_384)
    sessions = list(draw_sessions(agents, 4.0, 20.0, 0, SYSTEM_TOKENS))
    report = play_cluster([CoarseReplica(small)], ROUTING_POLICIES["router"](PROFILE, 0), sessions, LIMITS)
    assert report.unfinished == 0
    assert report.known_share < 0.95


def test_a_turns_prompt_begins_with_the_turn_before_it():
    script = Script("agent", 10, (Segment(3, 1.0, 4), Segment(2, None, 0)))
    session = AgentSession(5, 0.0, script, shared_tokens=20)
    first = first_turn(session)
    second = first.after(7.0)
    assert second is not None
    assert second.after(9.0) is None
    assert (first.prompt_tokens, second.prompt_tokens, second.at_s, second.known_tokens) == (30, 37, 8.0, 33)
    assert len(prompt_of(second)) == 37
    assert prompt_of(second)[:30] == prompt_of(first)
    assert first.hint().prefixes == second.hint().prefixes[1:]
