"""The example policies and every rival keep the rules, win where their rule says so, and lose where their flaw says so."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples import own_policy
from examples.memory_time import MemoryTime, TurnForecast, TurnHistory
from examples.rivals.belady import Belady
from examples.rivals.cachewise import LongestPrefix, PredictedReuse
from examples.rivals.continuum import ProgramOrder, TimeToLive
from examples.rivals.mars import FeedbackLevels, WarmReturns
from examples.rivals.mori import CYCLES, IdlenessTiers
from jinfercept.sched.estimator import ElapsedEstimator, make_estimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.orders import Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Policy, preserve
from jinfercept.sched.sequence import CallDuration, CallKind, PendingCall, Sequence
from jinfercept.sim.workload import OwnWorkload
from jinfercept.testing import check_policy
from tests.support.docs_blocks import blocks_of
from tests.support.fake_engine import AffineCost
from tests.support.scheduler_bench import SIZE, SchedulerBench

PROFILE = load_profile("paper-gptj-6b-a100")
KNOWN = PolicyInputs(PROFILE, PROFILE.saturation, 16, ElapsedEstimator())


def test_it_keeps_the_rules_of_orders() -> None:
    check_policy("copy_ahead", "examples.memory_time:MemoryTime")


def test_a_history_forecasts_the_rest_of_a_turn() -> None:
    history = TurnHistory()
    assert history.rest(0) is None
    history.add(4, "search")
    history.add(8, None)
    assert history.rest(0) == TurnForecast(6.0, 40.0, 1 / 3)
    assert history.rest(6) == TurnForecast(2.0, 4.0, 0.0)
    assert history.rest(8) is None


def served(order: MemoryTime, bench: SchedulerBench, name: str, prompt: int, tokens: int, tool: str | None) -> None:
    """Serve a turn: of so many tokens, up to a call or to the end."""
    sequence = bench.add(name, prompt, max_tokens=1000 if tool else tokens)
    while sequence.generated < tokens:
        bench.step()
    if tool:
        bench.scheduler.intercept(sequence, bench.now_s, (PendingCall(tool),))
        bench.scheduler.finish(sequence, bench.now_s)


def test_a_request_that_will_call_holds_more_than_one_that_ends() -> None:
    order = MemoryTime(KNOWN)
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=order)
    served(order, bench, "a", 6, 10, "search")
    served(order, bench, "b", 12, 10, None)
    again = bench.add("c", 6, max_tokens=15)
    while again.generated < 10:
        bench.step()
    bench.scheduler.intercept(again, bench.now_s, (PendingCall("search"),))
    bench.scheduler.resume(again, [1, 2], (CallDuration(1.0),))
    bench.drain()
    calling, ending = bench.add("d", 7), bench.add("e", 8)
    assert order.key(calling, 99.0) > order.key(ending, 99.0)


EXAMPLES = Path(own_policy.__file__).parent


def test_the_first_example_keeps_the_rules() -> None:
    check_policy(f"{EXAMPLES / 'own_policy.py'}:LastBackFirst")


def test_the_first_example_is_short_and_better_than_lru(capsys: pytest.CaptureFixture[str]) -> None:
    latencies = own_policy.main(40.0)
    assert latencies["LastBackFirst"] < latencies["lru"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len((EXAMPLES / "own_policy.py").read_text().splitlines()) < 60


def test_what_the_page_shows_can_be_used() -> None:
    names: dict[str, Any] = {}
    for block in blocks_of("own_policy.md"):
        if block.language == "python" and "LLM(" not in block.code:
            exec(block.code, names)
    call = PendingCall("search", 1)
    estimator = make_estimator(names["Mean"])
    assert estimator.remaining_s(call, 0.25) == 0.75
    estimator.observe(call, 4.0)
    assert estimator.remaining_s(call, 1.0) == 3.0
    assert OwnWorkload(names["browsing"], 4096).drawer(Random(1))().calls == 3
    assert names["check_policy"] is check_policy
    check_policy("copy_ahead", names["Smallest"])


RIVALS = (TimeToLive, IdlenessTiers, WarmReturns, PredictedReuse, Belady)
DEAR = AffineCost(fixed_s=20.0)
"""Prices by which a context is worth a pin of several seconds."""


@pytest.mark.parametrize(
    "rival", [Belady, *(pytest.param(rival, marks=pytest.mark.slow) for rival in RIVALS if rival is not Belady)]
)
def test_a_rival_keeps_the_rules(rival: type[Policy]) -> None:
    check_policy(rival)


@pytest.mark.slow
@pytest.mark.parametrize("order", [ProgramOrder, FeedbackLevels, LongestPrefix])
def test_the_order_of_a_rival_keeps_the_rules(order: type[Order]) -> None:
    check_policy("copy_ahead", order)


def bench_of(
    make: Callable[[PolicyInputs], Policy] | str, num_pages: int = 10, num_host_pages: int = 0
) -> SchedulerBench:
    """A second passes from plan to plan."""
    inputs = PolicyInputs(DEAR, 16, SIZE, ElapsedEstimator())
    return SchedulerBench(inputs.make(make), num_pages=num_pages, num_host_pages=num_host_pages)


def call_out(
    bench: SchedulerBench,
    sequence: Sequence,
    tool: str = "tool",
    kind: CallKind = "client_tool",
    expected_s: float | None = None,
) -> Sequence:
    bench.scheduler.intercept(sequence, bench.now_s, (PendingCall(tool, sequence.id, expected_s, kind=kind),))
    return sequence


def lost(sequence: Sequence) -> bool:
    """Whether the context has lost pages."""
    return sequence.context.residency(sequence.max_computed).missing > 0


# -- Continuum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "loser"), [("lru", "calls"), (TimeToLive, "answered")])
def test_a_context_that_waits_for_a_tool_is_pinned_before_one_that_was_answered_later(
    make: type[Policy] | str, loser: str
) -> None:
    bench = bench_of(make)
    calls = call_out(bench, bench.prefilled("calls", 16))
    answered = call_out(bench, bench.prefilled("answered", 16), kind="reader")
    bench.prefilled("new", 16)
    assert [sequence.id for sequence in (calls, answered) if lost(sequence)] == [loser]


def test_the_time_to_live_is_that_of_most_gain_by_the_tools_durations() -> None:
    policy = TimeToLive(PolicyInputs(DEAR, 16, SIZE, ElapsedEstimator()))
    assert policy.best_ttl_s("tool", 20.0) == pytest.approx(2.9957, rel=1e-4)  # ln 20: nothing is known
    policy.all_durations = policy.durations["tool"] = sorted([2.0] * 60 + [15.0] * 60)
    assert policy.best_ttl_s("tool", 20.0) == 2.0  # 20·½ − 2 is more than 20 − 15
    assert policy.best_ttl_s("tool", 40.0) == 15.0
    assert policy.best_ttl_s("tool", 3.0) == 0.0


# -- MORI --------------------------------------------------------------------------------------------------------------


def paused_in_turn(policy: Policy, *tools: str) -> dict[str, Sequence]:
    """Contexts of 16 tokens that wait for these tools, the first one longest, once another request needed slots of one."""
    bench = SchedulerBench(policy, num_pages=10, num_host_pages=0)
    contexts = {tool: call_out(bench, bench.prefilled(tool, 16), tool) for tool in tools}
    bench.steps(3)
    bench.prefilled("new", 16)
    return contexts


def test_the_program_that_waits_for_tools_most_leaves_the_device_first() -> None:
    policy = IdlenessTiers(PolicyInputs(DEAR, 16, SIZE, ElapsedEstimator()))
    bench = SchedulerBench(policy, num_pages=10, num_host_pages=0)
    contexts = {name: call_out(bench, bench.prefilled(name, 14)) for name in ("busy", "idle")}
    policy.programs["busy"].cycles.extend([(9.0, 1.0)] * CYCLES)
    policy.programs["idle"].cycles.extend([(1.0, 90.0)] * CYCLES)
    bench.steps(3)
    bench.prefilled("new", 16)
    assert [name for name, sequence in contexts.items() if lost(sequence)] == ["idle"]  # though it paused last
    assert policy.programs["busy"].idleness(bench.now_s) < 0.6 < policy.programs["idle"].idleness(bench.now_s)


# -- MARS --------------------------------------------------------------------------------------------------------------


def test_a_context_is_kept_for_a_tool_that_returns_before_it_could_be_computed_again() -> None:
    policy = WarmReturns(PolicyInputs(DEAR, 16, SIZE, ElapsedEstimator()))
    policy.durations = {"fast": (1, 2.0), "slow": (1, 90.0)}
    contexts = paused_in_turn(policy, "fast", "slow")
    assert [tool for tool, sequence in contexts.items() if lost(sequence)] == ["slow"]


# -- CacheWise ---------------------------------------------------------------------------------------------------------


def test_the_context_whose_tool_is_expected_to_run_longest_is_lost_first() -> None:
    policy = PredictedReuse(PolicyInputs(DEAR, 16, SIZE, ElapsedEstimator()))
    policy.durations = {"fast": [9.0], "slow": [60.0]}
    contexts = paused_in_turn(policy, "fast", "slow")
    assert [tool for tool, sequence in contexts.items() if lost(sequence)] == ["slow"]
    assert policy.rest_s(PendingCall("slow"), 20.0) == 40.0
    assert policy.rest_s(PendingCall("slow"), 70.0) == 70.0


def test_the_longest_prefix_in_a_cache_goes_first() -> None:
    order = LongestPrefix()
    bench = bench_of("lru", num_pages=20)
    kept = call_out(bench, bench.prefilled("kept", 16, max_tokens=20))
    new = bench.add("new", 16)
    bench.scheduler.resume(kept, [1], (CallDuration(1.0),))
    assert order.key(kept, 9.0) < order.key(new, 9.0)


# -- Bélády ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "loser"), [("lru", "soon"), (Belady, "late")])
def test_what_is_wanted_last_is_lost_first(make: type[Policy] | str, loser: str) -> None:
    bench = bench_of(make)
    soon = call_out(bench, bench.prefilled("soon", 16), expected_s=9.0)
    late = call_out(bench, bench.prefilled("late", 16), expected_s=90.0)
    bench.prefilled("new", 16)
    assert [sequence.id for sequence in (soon, late) if lost(sequence)] == [loser]


# -- whole runs --------------------------------------------------------------------------------------------------------
