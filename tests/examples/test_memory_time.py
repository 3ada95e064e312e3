"""The order by predicted memory·time: what its histories forecast, and who goes last."""

from examples.memory_time import MemoryTime, TurnForecast, TurnHistory
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import preserve
from jinfercept.sched.sequence import CallDuration, PendingCall
from jinfercept.testing import check_policy
from tests.support.scheduler_bench import SchedulerBench

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


def test_prompts_like_those_that_had_long_answers_go_last() -> None:
    order = MemoryTime(KNOWN)
    bench = SchedulerBench(preserve(), max_num_seqs=1, order=order)
    served(order, bench, "a", 6, 40, None)
    served(order, bench, "b", 12, 2, None)
    long, short = bench.add("c", 7), bench.add("d", 13)
    assert order.key(long, 9.0) > order.key(short, 9.0)


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
