"""Orders of waiting requests: what starts next, how often a request is overtaken at most, and what is refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError, PluginError
from jinfercept.kv.context import PageRun
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.guards import Guard
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.order import Order
from jinfercept.sched.orders import LONGER, LONGEST_S, MissingWork, check_order_choice, make_order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Move, preserve
from jinfercept.sched.queues import REFRESHED
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.workload import Script, Segment
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, CopyEverything, SchedulerBench, names
from tests.support.scheduler_scenarios import Scenario, ScenarioRun, hangs, scenarios

PROFILE = load_profile("paper-gptj-6b-a100")
KNOWN = PolicyInputs(PROFILE, PROFILE.saturation, 16, ElapsedEstimator())


class ShortestFirst(Order):
    """By tokens; its patience is short enough to be tried in a test."""

    patience = 3

    def key(self, sequence: Sequence, now: float) -> float:
        return sequence.length


class Counting(Order):
    """Ranks all alike, and counts the keys that a plan asks for."""

    def __init__(self) -> None:
        self.asked: Counter[float] = Counter()

    def key(self, sequence: Sequence, now: float) -> float:
        self.asked[now] += 1
        return 0.0


class Overtakings:
    """An observer that counts how often each waiting sequence is overtaken, and asserts the bound.

    Args:
        patience: of the order.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._waiting: dict[str, Sequence] = {}
        self._counts: Counter[str] = Counter()
        self.most = 0

    def changed(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.id, None)
        if sequence.state is State.WAITING:
            self._waiting[sequence.id] = sequence
        elif sequence.state is State.RUNNING:
            for name, other in self._waiting.items():
                if other.tenant == sequence.tenant and other.order < sequence.order:
                    self._counts[name] += 1
                    self.most = max(self.most, self._counts[name])
                    assert self._counts[name] <= self._patience, f"{other} was overtaken too often"
        else:
            self._counts.pop(sequence.id, None)

    def moved(self, move: Move, run: PageRun, copied_tokens: int, freed: int) -> None: ...


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


def test_no_request_is_overtaken_by_one_that_comes_later_than_the_longest_wait() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1)
    order = MissingWork(KNOWN._replace(cost=AffineCost(per_query_s=1.0)))
    long, late = bench.add("long", 40), bench.add("late", 1)
    assert LONGER * order.missing_s(long) > LONGEST_S
    late.since_s = LONGEST_S
    assert order.key(long, LONGEST_S) < order.key(late, LONGEST_S)


def test_where_keys_are_seconds_a_waiting_request_has_its_delay_behind_the_first() -> None:
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=MissingWork(KNOWN))
    bench.prefilled("running", 8, max_tokens=50)
    long, short = bench.add("long", 40), bench.add("short", 8)
    bench.step()
    assert short.delay_s == 0.0
    assert long.delay_s == pytest.approx(long.rank[1] - short.rank[1])
    other = SchedulerBench(preserve(), max_num_seqs=1, order=ShortestFirst())
    other.prefilled("running", 8, max_tokens=50)
    waiting = [other.add(f"{length}", length) for length in (8, 40)]
    other.step()
    assert [sequence.delay_s for sequence in waiting] == [0.0, 0.0]


# -- starvation --------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(scenarios(), st.sampled_from([0, 1, 2, 5]))
def test_every_request_runs_after_a_bounded_number_of_overtakings(scenario: Scenario, patience: int) -> None:
    def make() -> Order:
        order = ShortestFirst()
        order.patience = patience
        return order

    run = ScenarioRun(replace(scenario, order=make), observer=Overtakings(patience)).run()
    assert not run.failures
    for number, (_, script) in enumerate(scenario.arrivals):
        assert number in run.outputs or hangs(script), f"request {number} never ends"


def test_the_bound_is_reached_and_then_the_overtaken_goes_first() -> None:
    shorts = tuple(Arrival(0.01 * number, Script("chat", 4, (Segment(3, None, 0),))) for number in range(30))
    long = Arrival(0.005, Script("chat", 40, (Segment(3, None, 0),)))
    counted = Overtakings(ShortestFirst.patience)
    ScenarioRun(Scenario((long, *shorts), order=ShortestFirst), observer=counted).run()
    assert counted.most == ShortestFirst.patience


def test_without_patience_it_is_first_come_first_served() -> None:
    class Impatient(ShortestFirst):
        patience = 0

    coming = tuple(
        Arrival(0.01 * number, Script("chat", 36 - 4 * number, (Segment(5, None, 0),))) for number in range(8)
    )
    plans = [
        [plan.plan for plan in ScenarioRun(Scenario(coming, order=order)).run().plans] for order in ("fcfs", Impatient)
    ]
    assert plans[0] == plans[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


OWN = """
from jinfercept.sched.orders import LONGER, MissingWork
from jinfercept.sched.order import Order


class Longest(Order):
    def key(self, sequence, now):
        return -sequence.length


class Nothing(Order): ...


class Restless(Longest):
    patience = -1


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
        ("{own}:Nothing", r"an order has the methods of Order; got the class .*; fix: add key\(self, sequence, now\)"),
        ("{own}:Restless", r"has a patience that is no number of overtakings; got -1; fix: a whole number, at least 0"),
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


def test_simulate_compares_orders(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orders = f"fcfs,missing_work,{own}:Longest,{own}:Broken"
    assert main(["simulate", "--order", orders, "--duration", "4", "--jobs", "1", "--policy", "lru"]) == 1
    shown = capsys.readouterr().out
    assert "ZeroDivisionError: float division by zero in key (own_order.py" in shown
    assert [line.split("  ")[0].split()[1:3] for line in shown.splitlines()[2:3]] == [["lru,", "missing_work"]]
