"""Requests that arrive at once, played on an engine whose device pool may be too small for them. Imports no JAX.

No request calls out: what overflows are running requests. One loop plays them, whether the engine computes or prices plans.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.protocols import Clock, Runner
from jinfercept.meter.request_log import LogEvent, RequestLog, Stepped
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sim.scripted import ScriptedDispatcher, make_request, play
from jinfercept.sim.session_clients import Writer
from jinfercept.sim.workload import Script, Segment

MOST_S = 1e7
"""Seconds that a batch may take."""


class BatchRequest(NamedTuple):
    """Tokens of a prompt, and tokens to generate."""

    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """Tokens of KV at its end: the last token's are never needed."""
        return self.prompt + self.output - 1


class BatchStep(NamedTuple):
    """A step of a run.

    Attributes:
        at_s: its end, in seconds since the start of the run.
        prompt_tokens: query tokens in chunks of several: prompts, and what is recomputed.
        decode_tokens: query tokens in chunks of one.
        used_pages: pages of running sequences after it was planned.
        preemptions: sequences that were preempted up to now.
        moved_pages: pages that cross the link, both ways together.
    """

    at_s: float
    prompt_tokens: int
    decode_tokens: int
    used_pages: int
    preemptions: int
    moved_pages: int = 0

    @property
    def plan(self) -> tuple[int, ...]:
        """What tells its plan from another one's, its time aside."""
        return self[1:]


class BatchRun(NamedTuple):
    """A batch that was served.

    Attributes:
        seconds: from its arrival to the end of its last step.
        counters: the scheduler's.
        steps: in order.
        streams: the tokens of every request.
    """

    seconds: float
    counters: SchedulerCounters
    steps: Sequence[BatchStep]
    streams: Mapping[str, Sequence[int]]

    @property
    def peak_pages(self) -> int:
        """Most pages that running sequences had at once."""
        return max(step.used_pages for step in self.steps)


@final
class _Steps:
    """Collects the steps of an engine, a fold over its log."""

    def __init__(self, scheduler: Scheduler, timer: Callable[[], float]) -> None:
        self.steps: list[BatchStep] = []
        self._scheduler, self._timer, self._started_s = scheduler, timer, timer()

    def __call__(self, event: LogEvent) -> None:
        if not isinstance(event, Stepped):
            return
        plan = event.planned.plan
        sizes = [len(chunk.tokens) for chunk in plan.chunks]
        decoded = sizes.count(1)
        self.steps.append(
            BatchStep(
                self._timer() - self._started_s,
                sum(sizes) - decoded,
                decoded,
                self._scheduler.kv.occupancy().used,
                self._scheduler.counters.preemptions,
                len(plan.offload) + len(plan.fetch),
            )
        )


def play_batch(
    scheduler: Scheduler,
    runner: Runner,
    clock: Clock,
    requests: Sequence[BatchRequest],
    write: Writer,
    *,
    depth: int,
    vocab_size: int,
    timer: Callable[[], float] | None = None,
    host_s: float = 0.0,
) -> BatchRun:
    """Serve requests that all arrive now, in their order.

    Args:
        scheduler: without sequences.
        runner: executes or prices its plans.
        clock: the runner's.
        write: makes the prompts.
        depth: the engine's pipeline depth.
        vocab_size: the model's.
        timer: gives the steps' seconds (default: the clock).
        host_s: seconds of the engine's own work in every step, which a virtual clock does not see.
    """
    dispatcher, steps, log = (
        ScriptedDispatcher(clock, write),
        _Steps(scheduler, timer or clock.now),
        RequestLog(clock.now),
    )
    log.tell(steps)
    lifecycle = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=vocab_size)
    engine = Engine(lifecycle, runner, threading.Event(), depth=depth, request_log=log)
    scripts = [Script("batch", request.prompt, (Segment(request.output, None, 0),)) for request in requests]
    coming = [(0.0, make_request(number, script, write)) for number, script in enumerate(scripts)]
    try:
        played = play(engine, dispatcher, clock, coming, MOST_S, lambda now, end: None, host_s)
    finally:
        engine.close()
    assert len(played.outputs) == len(requests), "a request was not served"
    streams = {output.request_id: output.outputs[0].token_ids for output in played.outputs}
    return BatchRun(steps.steps[-1].at_s, scheduler.counters, steps.steps, streams)
