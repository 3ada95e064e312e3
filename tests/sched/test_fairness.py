"""Several tenants on one scheduler: who is first, who gives way, and how long a tenant with one request waits."""

import threading
from collections.abc import Sequence as Several
from dataclasses import dataclass
from random import Random
from statistics import mean

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.events import Finished, Token
from jinfercept.kv.manager import KVManager
from jinfercept.meter.prices import Prices
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.fairness import AHEAD_S, CREDIT_S, FairShare
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import preserve
from jinfercept.sched.queues import Queues
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.scripted import ScriptedDispatcher
from jinfercept.sim.simulator import PricedRunner, VirtualClock
from tests.support.scheduler_bench import SchedulerBench, names

# -- how long a tenant waits -------------------------------------------------------------------------------------------

BOUND = 2.0
"""Times the wait of a tenant with one request against one other tenant with one request."""
PAGE = 16


@dataclass(frozen=True)
class Client:
    """A tenant that keeps so many requests in the engine, each of lengths drawn from these ranges."""

    tenant: str
    number: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    think_s: float = 0.0


LONE = Client("lone", 1, (30, 400), (10, 60), think_s=1.0)
SHAPES = {
    "long answers": ((10, 40), (700, 900)),
    "long prompts": ((700, 900), (1, 5)),
    "both long": ((500, 600), (200, 300)),
    "short": ((5, 10), (1, 3)),
    "mixed": ((5, 900), (1, 100)),
}


def waits_of_the_lone(others: Several[Client], until_s: float) -> list[float]:
    """Seconds from arrival to first token of the lone client's requests, on the paper's GPU, one step ahead."""
    clients, rng, clock = (LONE, *others), Random(0), VirtualClock()
    profile, estimator = load_profile("paper-gptj-6b-a100"), ElapsedEstimator()
    policy = PolicyInputs(profile, 256, PAGE, estimator).make("copy_ahead")
    scheduler = Scheduler(
        KVManager(2048 // PAGE, 2048 // PAGE, PAGE),
        policy,
        profile,
        estimator,
        buckets=(32, 64, 256),
        max_num_seqs=8,
        max_model_len=1024,
        chunk_tokens=256,
    )
    dispatcher = ScriptedDispatcher(clock, lambda number, place, count: ())
    priced = PricedRunner(Prices(profile, PAGE, synchronous=policy.synchronous), clock)
    engine = Engine(scheduler, priced, dispatcher, clock, threading.Event(), depth=1, vocab_size=50_000)
    due = [(0.0, client) for client in clients for _ in range(client.number)]
    came: dict[str, tuple[Client, float]] = {}
    waits: list[float] = []
    began: set[str] = set()
    while clock.time < until_s:
        for entry in [entry for entry in due if entry[0] <= clock.time]:
            due.remove(entry)
            client, name = entry[1], str(len(came))
            prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(*client.prompt)))
            params = SamplingParams(temperature=0, max_tokens=rng.randint(*client.answer), ignore_eos=True)
            engine.submit(Request(name, prompt, params, tenant=client.tenant))
            came[name] = client, clock.time
        dispatcher.next_arrival_s = min((at_s for at_s, _ in due), default=float("inf"))
        if not engine.has_work:
            clock.time = dispatcher.next_arrival_s
            continue
        for event in engine.step():
            client, at_s = came[event.request_id]
            if isinstance(event, Token) and event.request_id not in began:
                began.add(event.request_id)
                if client is LONE:
                    waits.append(clock.time - at_s)
            elif isinstance(event, Finished):
                due.append((clock.time + (rng.expovariate(1 / client.think_s) if client.think_s else 0.0), client))
    assert len(waits) > 5
    return waits


@pytest.mark.parametrize("shape", ["mixed", *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES if s != "mixed")])
def test_a_tenant_with_one_request_waits_twice_as_long_as_beside_one_other_request_at_most(shape: str) -> None:
    prompt, answer = SHAPES[shape]
    polite = waits_of_the_lone([Client("other", 1, prompt, answer)], 15.0)
    hostile = waits_of_the_lone([Client("other", 60, prompt, answer)], 15.0)
    assert mean(hostile) <= BOUND * mean(polite)
    assert max(hostile) <= BOUND * max(polite)


def test_several_hostile_tenants_are_as_bad_as_one() -> None:
    """One context of each of them leaves room for the lone one's: else one of them has to end first."""
    prompt, answer = (5, 400), (1, 100)
    polite = waits_of_the_lone([Client("other", 1, prompt, answer)], 15.0)
    hostile = waits_of_the_lone([Client(f"other {number}", 20, prompt, answer) for number in range(3)], 15.0)
    assert mean(hostile) <= BOUND * mean(polite)


# -- rights and order --------------------------------------------------------------------------------------------------


def test_sequences_of_one_tenant_start_as_they_came() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2)
    for name in "abcd":
        bench.add(name, 4, max_tokens=2, tenant="one")
    bench.step()
    assert names(bench.scheduler.running) == ["a", "b"]
    assert names(bench.scheduler.waiting) == ["c", "d"]


def test_a_tenant_that_has_nothing_running_takes_a_slot_of_one_that_has_several() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=3)
    for name in "abcdef":
        bench.add(name, 4, max_tokens=40, tenant="many")
    bench.steps(5)
    assert names(bench.scheduler.running) == ["a", "b", "c"]
    lone = bench.add("lone", 4, max_tokens=3, tenant="one")
    bench.step()
    assert names(bench.scheduler.running) == ["a", "b", "lone"], "the youngest gives way"
    assert lone.generated == 1
    bench.steps(3)
    assert names(bench.scheduler.running) == ["a", "b", "c"], "and comes back before those that came later"


def test_a_tenant_takes_no_slot_of_one_that_has_a_single_sequence() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2)
    for tenant in ("one", "two", "three"):
        bench.add(tenant, 4, max_tokens=6, tenant=tenant)
    bench.steps(3)
    assert names(bench.scheduler.running) == ["one", "two"]
    assert bench.scheduler.counters.preemptions == 0
    bench.drain()


def test_slots_are_shared_until_no_tenant_runs_twice_as_many_as_one_that_waits() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400, buckets=(4, 64))
    for number in range(20):
        bench.add(f"m{number}", 4, max_tokens=90, tenant="many")
    bench.steps(3)
    for number in range(20):
        bench.add(f"s{number}", 4, max_tokens=90, tenant="some")
    bench.steps(10)
    running = [sequence.tenant for sequence in bench.scheduler.running]
    assert running.count("some") == 4
    preemptions = bench.scheduler.counters.preemptions
    bench.steps(20)
    assert bench.scheduler.counters.preemptions == preemptions, "running sequences preempt each other in turns"


def test_pages_are_shared_until_no_tenant_holds_twice_as_many_tokens_as_one_that_waits() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=40, buckets=(4, 64))
    for name in "abc":
        bench.prefilled(name, 40, max_tokens=60)
    first = bench.add("d", 8, max_tokens=30, tenant="some")
    second = bench.add("e", 9, max_tokens=30, tenant="some")
    large = bench.add("f", 120, max_tokens=30, tenant="some")
    bench.steps(2)
    assert (first.state, second.state) == (State.RUNNING, State.RUNNING)
    assert len(bench.scheduler.running) == 4, "one of the many gave way for its pages"
    assert large.state is State.WAITING, "no batch is emptied for a context larger than its share"
    bench.drain()


def test_a_burst_of_a_tenant_that_has_used_little_takes_pages_of_one_that_has_used_much() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=20, num_pages=40, buckets=(4, 64))
    for number in range(12):
        bench.add(f"g{number}", 12, max_tokens=120, tenant="greedy")
    bench.add("modest", 4, max_tokens=120, tenant="modest")
    most, fair = 160, bench.scheduler._fair  # pyright: ignore[reportPrivateUsage]
    while fair.used("greedy") < fair.used("modest") + AHEAD_S * most:
        bench.step()
    before = bench.scheduler.counters.preemptions
    burst = [bench.add(f"m{number}", 20, max_tokens=4, tenant="modest") for number in range(4)]
    bench.steps(3)
    assert all(sequence.generated for sequence in burst)
    assert bench.scheduler.counters.preemptions >= before + 3
    bench.drain()


def get_ahead(bench: SchedulerBench, number: int) -> None:
    """Let a greedy tenant's sequences use far more than the one of a modest tenant."""
    for place in range(number):
        bench.add(f"g{place}", 12, max_tokens=300, tenant="greedy")
    bench.add("m", 12, max_tokens=300, tenant="modest")
    fair = bench.scheduler._fair  # pyright: ignore[reportPrivateUsage]
    while fair.used("greedy") < fair.used("modest") + 2 * AHEAD_S * 8 * 40:
        bench.step()


def test_a_tenant_that_is_far_ahead_gives_up_its_last_sequence_for_a_short_time_and_not_again_soon() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400, buckets=(8, 256))
    get_ahead(bench, 8)
    for number in range(9):
        bench.add(f"m{number}", 12, max_tokens=300, tenant="modest")
    bench.step()
    assert bench.tenants == {"modest"}
    greedy = [1 for _ in range(int(CREDIT_S)) for _ in [bench.step()] if "greedy" in bench.tenants]
    assert len(greedy) >= CREDIT_S - AHEAD_S - 1, (
        "after `AHEAD_S` the greedy tenant has a running sequence again, which gives way to none within `CREDIT_S`"
    )
    bench.drain()


def test_a_tenant_that_gave_way_does_not_come_before_the_others_in_a_slot_that_gets_free() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400, buckets=(8, 256))
    get_ahead(bench, 8)
    for number in range(9):
        bench.add(f"m{number}", 12, max_tokens=1 if number == 0 else 300, tenant="modest")
    bench.steps(2)
    assert bench.tenants == {"modest"}
    bench.drain()


def test_a_step_that_runs_others_leaves_out_tenants_that_are_ahead_three_times_of_four() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400, buckets=(8, 16), per_query_s=1.0)
    get_ahead(bench, 6)
    bench.add("long", 200, max_tokens=4, tenant="modest")
    bench.step()
    assert sorted(len(bench.step().chunks) for _ in range(8)) == [2, 2, 2, 2, 2, 2, 8, 8]
    bench.drain()


def test_decodes_of_a_tenant_that_is_ahead_fill_the_bucket_that_the_others_need() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=16, num_pages=400, buckets=(8, 16), per_query_s=1.0)
    get_ahead(bench, 12)
    assert sorted(len(bench.step().chunks) for _ in range(4)) == [8, 8, 8, 13]
    bench.drain()


def test_where_a_longer_step_costs_little_nobody_is_left_out() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=16, num_pages=400, buckets=(8, 16), per_query_s=0.01)
    get_ahead(bench, 12)
    assert [len(bench.step().chunks) for _ in range(4)] == [13] * 4
    bench.drain()


def test_prompts_of_a_tenant_that_is_ahead_do_not_prolong_a_step_much_after_the_others_have_gone() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400, buckets=(8, 16, 256), per_query_s=1.0)
    get_ahead(bench, 6)
    modest = next(sequence for sequence in bench.scheduler.running if sequence.tenant == "modest")
    bench.scheduler.finish(modest, bench.now_s)
    bench.add("g9", 200, max_tokens=4, tenant="greedy")
    assert bench.step().bucket == 16
    bench.steps(int(CREDIT_S) + 1)
    bench.add("g10", 200, max_tokens=4, tenant="greedy")
    assert bench.step().bucket == 256
    bench.drain()


def test_a_plan_waits_for_the_steps_in_flight_while_a_tenant_is_ahead() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=400)
    assert not bench.scheduler.waits
    get_ahead(bench, 6)
    assert bench.scheduler.waits
    bench.drain()


def test_of_two_tenants_the_one_that_has_used_less_memory_time_is_next() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2, buckets=(4, 64))
    large = bench.add("large", 24, max_tokens=5, tenant="large")
    small = bench.add("small", 12, max_tokens=5, tenant="small")
    bench.add("large2", 24, max_tokens=5, tenant="large")
    bench.add("small2", 12, max_tokens=5, tenant="small")
    bench.steps(4)
    fair = bench.scheduler._fair  # pyright: ignore[reportPrivateUsage]
    assert fair.used("large") > fair.used("small")
    while large.generated < 5 or small.generated < 5:
        bench.step()
    bench.step()
    assert sorted(names(bench.scheduler.running)) == ["large2", "small2"]


def fair_queues(*used: tuple[str, int]) -> tuple[FairShare, Queues, SchedulerBench]:
    """Tenants that ran one sequence of so many tokens for a second each."""
    queues, bench = Queues(10), SchedulerBench(preserve())
    fair = FairShare(queues, bench.scheduler._budget, 0)  # pyright: ignore[reportPrivateUsage]
    for tenant, num_tokens in used:
        sequence = Sequence(tenant, [1] * num_tokens, bench.kv.open(), max_tokens=1, tenant=tenant)
        queues.put_last(sequence)
        queues.run(sequence)
    fair.charge(0.0)
    fair.charge(1.0)
    return fair, queues, bench


def test_use_counts_beyond_a_share_up_to_so_many_seconds_of_all_that_runs() -> None:
    fair, queues, bench = fair_queues(("a", 10), ("b", 20))
    assert (fair.used("a"), fair.used("b")) == (0.0, 5.0), "the share of each is 15"
    fair.charge(11.0)
    assert (fair.used("a"), fair.used("b")) == (0.0, 55.0)
    fair.charge(100.0)
    assert fair.used("b") == CREDIT_S * 30
    queues.put_last(Sequence("new", [1], bench.kv.open(), max_tokens=1, tenant="new"))
    fair.charge(100.0)
    assert fair.used("new") == fair.used("a") == 0.0, "who comes anew is not before one that stays within its share"


def test_use_beyond_a_share_is_forgotten_as_the_share_grows() -> None:
    fair, queues, bench = fair_queues(("a", 10), ("b", 20), ("c", 6))
    assert fair.used("b") == 8.0
    [b] = queues.by_tenant["b"].running
    queues.finish(b)
    fair.charge(1.25)
    queues.put_last(Sequence("again", [1], bench.kv.open(), max_tokens=1, tenant="b"))
    fair.charge(1.25)
    assert 8.0 > fair.used("b") > 4.0 > fair.used("c")
    fair.charge(9.0)
    assert fair.used("b") == 0.0


def test_tenants_that_use_the_same_are_served_as_they_came() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1)
    bench.prefilled("runs", 4, max_tokens=20)
    for name in ("x", "y", "z"):
        bench.add(name, 4, max_tokens=3, tenant=name)
    order: list[str] = []
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
        order += [name for name in names(bench.scheduler.running) if name not in order]
    assert order == ["runs", "x", "y", "z"]


def test_priority_comes_before_use() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1)
    bench.prefilled("runs", 4, max_tokens=6)
    late = Sequence("late", [5] * 4, bench.kv.open(), max_tokens=2, tenant="a", priority=1)
    soon = Sequence("soon", [6] * 4, bench.kv.open(), max_tokens=2, tenant="b", priority=0)
    for sequence in (late, soon):
        bench.scheduler.add(sequence)
    while soon.generated == 0:
        assert late.generated == 0
        bench.step()
    bench.drain()


def test_memory_of_tenants_that_are_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfercept.sched.fairness._MOST_IDLE", 3)
    fair, queues, bench = fair_queues(("a", 10), ("b", 20))
    for number in range(20):
        sequence = Sequence(str(number), [1], bench.kv.open(), max_tokens=1, tenant=f"t{number}")
        queues.put_last(sequence)
        fair.charge(float(number + 2))
        queues.finish(sequence)
        fair.charge(float(number + 2))
    assert len(fair._used) <= 2 + 3 + 1  # pyright: ignore[reportPrivateUsage]
