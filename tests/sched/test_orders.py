"""Orders of waiting requests: what starts next, how long a request is overtaken at most, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError, PluginError
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.orders import LONGER, MissingWork, Order, check_order_choice, make_order
from jinfercept.sched.plugins import Guard
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import preserve
from jinfercept.sched.queues import LONGEST_S, REFRESHED
from jinfercept.sched.sequence import Sequence, State
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench, names

PROFILE = load_profile("paper-gptj-6b-a100")
KNOWN = PolicyInputs(PROFILE, PROFILE.saturation, 16, ElapsedEstimator())


class ShortestFirst(Order):
    """By tokens."""

    def key(self, sequence: Sequence, now: float) -> float:
        return sequence.length


class Counting(Order):
    """Ranks all alike, and counts the keys that a plan asks for."""

    def __init__(self) -> None:
        self.asked: Counter[float] = Counter()

    def key(self, sequence: Sequence, now: float) -> float:
        self.asked[now] += 1
        return 0.0


# -- what starts next --------------------------------------------------------------------------------------------------


def test_the_least_key_starts_first_and_equal_keys_by_arrival() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=ShortestFirst())
    for name, length in (("a", 9), ("b", 4), ("c", 7), ("d", 4)):
        bench.add(name, length, max_tokens=2)
    bench.step()
    assert names(bench.scheduler.running) == ["b"]
    assert names(bench.scheduler.waiting) == ["d", "c", "a"]


def test_a_smaller_priority_goes_before_every_key() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=ShortestFirst())
    for name, length, priority in (("short", 4, 1), ("long", 20, 0)):
        sequence = Sequence(name, [1] * length, bench.kv.open(), max_tokens=2, priority=priority)
        bench.scheduler.add(sequence)
    bench.step()
    assert names(bench.scheduler.running) == ["long"]


def test_a_tenants_requests_are_ordered_among_each_other() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=2, order=ShortestFirst())
    for name, length, tenant in (("a", 20, "x"), ("b", 4, "x"), ("c", 30, "y"), ("d", 25, "y")):
        bench.add(name, length, tenant=tenant)
    bench.step()
    assert names(bench.scheduler.running) == ["b", "d"]


def test_running_sequences_are_not_preempted_by_the_order() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=ShortestFirst())
    long = bench.prefilled("long", 20, max_tokens=6)
    bench.add("short", 2)
    bench.step()
    assert long.state is State.RUNNING
    assert long.preemptions == 0


def test_a_plan_asks_for_few_keys_however_many_wait() -> None:
    order = Counting()
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=order)
    for number in range(40):
        bench.add(f"{number}", 4, max_tokens=50)
    bench.steps(10)
    first, *later = order.asked.values()
    assert first <= 40 + REFRESHED
    assert max(later) <= REFRESHED


# -- missing work ------------------------------------------------------------------------------------------------------


def test_a_return_with_its_kv_passes_a_new_prompt_that_is_being_computed() -> None:
    slow = KNOWN._replace(cost=AffineCost(per_query_s=1.0), saturation=SIZE, page_size=SIZE)
    bench = SchedulerBench(preserve(), buckets=(4,), order=MissingWork(slow))
    paused = bench.paused("paused", 12)
    new = bench.add("new", 40)
    bench.step()
    assert new.state is State.RUNNING
    bench.scheduler.resume(paused, [1, 2])
    plan = bench.step()
    assert paused.row.slot in [chunk.slot for chunk in plan.chunks]
    assert new.state is State.RUNNING
    assert new.preemptions == 0
    bench.drain()


def test_missing_work_is_what_is_computed_at_its_place_and_what_is_fetched() -> None:
    bench = SchedulerBench(CopyEverything(), order=Counting())
    order = MissingWork(KNOWN._replace(page_size=bench.kv.page_size))
    paused = bench.paused("paused", 12)
    assert order.missing_s(bench.add("longer", 30)) > order.missing_s(bench.add("new", 12)) > 0.0
    bench.scheduler.resume(paused, [1, 2])
    returned_s = order.missing_s(paused)
    bench.kv.drop(paused.context, range(2), device=True, host=True)
    assert returned_s < order.missing_s(paused)


def test_a_request_with_much_missing_work_goes_first_once_it_has_waited_long_for_it() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1)
    order = MissingWork(KNOWN)
    long, early, late = (bench.add(name, length) for name, length in (("long", 40), ("early", 8), ("late", 8)))
    waits_s = LONGER * (order.missing_s(long) - order.missing_s(early))
    early.since_s, late.since_s = 0.9 * waits_s, 1.1 * waits_s
    assert order.key(early, 9.0) < order.key(long, 9.0) < order.key(late, 9.0)


# -- starvation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waited_s", [LONGEST_S - 5.0, LONGEST_S + 5.0])
def test_a_request_that_has_waited_too_long_goes_before_every_key(waited_s: float) -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=ShortestFirst())
    bench.prefilled("running", 4, max_tokens=3)
    long = bench.add("long", 20, max_tokens=2)
    bench.now_s += waited_s
    short = bench.add("short", 4, max_tokens=2)
    short.since_s = bench.now_s
    while not (started := {*names(bench.scheduler.running)} & {"long", "short"}):
        bench.step()
    assert started == {"long" if waited_s > LONGEST_S else "short"}
    assert long.state is not short.state


# -- what is refused ---------------------------------------------------------------------------------------------------


OWN = """
from jinfercept.sched.orders import LONGER, MissingWork
from jinfercept.sched.orders import Order


class Longest(Order):
    def key(self, sequence, now):
        return -sequence.length


class Nothing(Order): ...


class Broken(Longest):
    def key(self, sequence, now):
        return 1 / (now - now)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_order.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            "fifo",
            r"no such order; got fifo; fix: one of fcfs, missing_work; or your own, as path.py:Class",
        ),
        ("{own}:Nothing", r"Nothing raised when it was made; got TypeError: .* abstract method 'key'"),
    ],
)
def test_an_order_that_cannot_be_made_is_refused_with_what_is_wrong(own: Path, place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_order_choice(place.format(own=own))


def test_built_in_orders_run_without_a_guard_and_first_come_first_served_is_none(own: Path) -> None:
    assert make_order("fcfs", KNOWN) is None
    assert type(make_order("missing_work", KNOWN)) is MissingWork
    assert type(make_order(f"{own}:Longest", KNOWN)) is Guard


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), None, "1"])
def test_a_key_that_is_no_number_is_an_error_that_names_the_order(nonsense: Any) -> None:
    class Wrong(Order):
        def key(self, sequence: Sequence, now: float) -> float:
            return nonsense

    bench = SchedulerBench(preserve(), order=make_order(Wrong, KNOWN))
    bench.add("a", 4)
    with pytest.raises(PluginError, match=r"the order Wrong answers .* in key, which is no finite number"):
        bench.step()
