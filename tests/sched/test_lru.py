"""What is written through to the host, and when writing ends."""

from jinfercept.sched.lru import LeastRecentlyUsed
from jinfercept.sched.sequence import Sequence
from tests.support.scheduler_bench import SIZE, SchedulerBench


def test_writing_through_ends_where_a_paused_context_shares_pages_with_one_that_runs() -> None:
    """The host is too small for both: copies of a running context give way, and are not made again for the paused one."""
    bench = SchedulerBench(LeastRecentlyUsed(writes_through=True), num_pages=60, num_host_pages=8)
    running = bench.prefilled("running", 12 * SIZE, max_tokens=60)
    paused = Sequence("paused", [*running.tokens[: 12 * SIZE], *range(6 * SIZE)], bench.kv.open(), max_tokens=8)
    bench.scheduler.add(paused)
    while paused.generated == 0:
        bench.step()
    bench.scheduler.intercept(paused, bench.now_s)
    bench.steps(20)
    assert sum(len(plan.offload) for plan in bench.steps(20)) <= 20 // SIZE  # what the running one generates
