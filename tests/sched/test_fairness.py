"""Several tenants on one scheduler, with weights or without: who is first, who gives way, and how long one waits."""

import threading
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle, check_request
from jinfercept.engine.meter.ledger import Prices
from jinfercept.errors import RequestError
from jinfercept.events import Finished, Token
from jinfercept.kv.manager import KVManager
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import preserve
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits
from jinfercept.sched.sequence import Sequence
from jinfercept.sim.scripted import ScriptedDispatcher
from jinfercept.sim.simulation import PricedRunner, VirtualClock
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
        SchedulerLimits((32, 64, 256), max_num_seqs=8, max_model_len=1024),
    )
    dispatcher = ScriptedDispatcher(clock, lambda number, place, count: ())
    priced = PricedRunner(Prices(profile, PAGE, synchronous=policy.synchronous), clock)
    requests = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=50_000)
    engine = Engine(requests, priced, threading.Event(), depth=1)
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


def test_a_tenant_that_was_served_more_takes_no_slot_of_one_that_was_served_less() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2, num_pages=400, buckets=(4, 64))
    for name in "ab":
        bench.add(name, 4, max_tokens=300, tenant="many")
    first = bench.add("x", 60, max_tokens=1, tenant="one")
    while not first.generated:
        bench.step()
    bench.add("y", 4, max_tokens=1, tenant="one")
    bench.steps(10)
    assert names(bench.scheduler.running) == ["a", "b"]
    bench.steps(30)
    assert names(bench.scheduler.waiting) == []
    bench.drain()


def test_prompts_are_computed_as_the_weights_of_their_tenants_say() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=8, num_pages=4000, buckets=(4, 64))
    heavy, light = (
        Sequence(name, [number] * 1500, bench.kv.open(), max_tokens=4, tenant=name, weight=weight)
        for number, (name, weight) in enumerate([("heavy", 3.0), ("light", 1.0)])
    )
    for sequence in (light, heavy):
        bench.scheduler.add(sequence)
    bench.steps(20)
    assert heavy.max_computed == pytest.approx(3 * light.max_computed, rel=0.15)


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


PLANS = 500


@final
class Crowd:
    """Tenants that always have as many sequences waiting as are asked for, and the memory·time that each has used."""

    def __init__(
        self, weights: Mapping[str, float], seed: int, *, max_num_seqs: int = 16, num_pages: int = 200
    ) -> None:
        self.bench = SchedulerBench(
            preserve(), max_num_seqs=max_num_seqs, num_pages=num_pages, buckets=(4, 64), check=False
        )
        self.weights, self.rng, self.number = weights, Random(seed), 0
        self.used = Counter[str]()

    def play(self, plans: int, busy: str, waiting: int = 6) -> None:
        """So many plans; the tenants of `busy` have work all the time, the others get none."""
        scheduler = self.bench.scheduler
        for _ in range(plans):
            for tenant in busy:
                for _ in range(waiting - scheduler.num_waiting_of(tenant)):
                    self.number += 1
                    prompt, answer = self.rng.randint(4, 24), self.rng.randint(2, 24)
                    self.bench.add(str(self.number), prompt, answer, tenant, self.weights[tenant])
            for sequence in scheduler.running:
                self.used[sequence.tenant] += len(sequence.tokens)
            self.bench.step()

    def shares(self) -> dict[str, float]:
        """Memory·time of each tenant over its weight, as a share of what it would be if all were served alike."""
        total, weights = sum(self.used.values()), sum(self.weights[tenant] for tenant in self.used)
        return {tenant: used / total * weights / self.weights[tenant] for tenant, used in self.used.items()}


@settings(max_examples=3)
@given(
    weights=st.fixed_dictionaries({tenant: st.sampled_from([1.0, 2.0, 3.0, 5.0]) for tenant in "abc"}),
    seed=st.integers(0, 99),
    memory_bound=st.booleans(),
)
def test_tenants_that_always_have_work_hold_memory_as_their_weights_say(
    weights: Mapping[str, float], seed: int, memory_bound: bool
) -> None:
    crowd = Crowd(weights, seed, max_num_seqs=64 if memory_bound else 16, num_pages=80 if memory_bound else 800)
    crowd.play(PLANS, "abc")
    assert crowd.shares() == pytest.approx(dict.fromkeys("abc", 1.0), rel=0.15)


def test_what_an_idle_tenant_does_not_use_goes_to_the_others_as_their_weights_say() -> None:
    crowd = Crowd({"a": 4.0, "b": 2.0, "c": 1.0}, 0)
    crowd.play(100, "abc")
    crowd.play(60, "bc")
    crowd.used.clear()
    crowd.play(PLANS, "bc")
    assert crowd.shares() == pytest.approx({"b": 1.0, "c": 1.0}, rel=0.1)
    crowd.used.clear()
    crowd.play(PLANS, "abc")
    assert crowd.shares() == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0}, rel=0.12), "idle time is no credit"


def test_the_lightest_tenant_gets_its_share_where_that_is_less_than_one_sequence() -> None:
    crowd = Crowd({"h": 19.0, "l": 1.0}, 0, max_num_seqs=8)
    crowd.play(4 * PLANS, "hl")
    assert crowd.used["l"] / crowd.used.total() == pytest.approx(0.05, rel=0.3)


@settings(max_examples=3)
@given(weights=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=5), seed=st.integers(0, 9))
def test_no_tenant_starves(weights: list[float], seed: int) -> None:
    crowd = Crowd({chr(97 + number): weight for number, weight in enumerate(weights)}, seed, max_num_seqs=6)
    tenants = "".join(crowd.weights)
    first = {tenant: crowd.bench.add(f"first {tenant}", 12, 12, tenant, crowd.weights[tenant]) for tenant in tenants}
    crowd.play(2 * PLANS, tenants, waiting=3)
    crowd.bench.drain()
    assert all(sequence.generated == 12 for sequence in first.values())


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    request = Request("a", (1, 2), SamplingParams(), weight=weight)
    with pytest.raises(RequestError, match="weight"):
        check_request(request, 10, 100)
