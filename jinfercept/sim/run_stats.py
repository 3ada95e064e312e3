"""What a run cost: the same numbers from the same code, whether plans were executed or priced. Imports no JAX.

Time is the engine's clock's. What part of a step was recomputation, and how long a step waited for its transfers, no clock can
see: these two come from the profile's price of the plan, in a real run too. `step_s` in the report lays measured and priced
seconds of all steps side by side, and `slowness` their ratio for each bucket, and so say how far to trust that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, final

from jinfercept.engine.clock import Clock
from jinfercept.meter.ledger import Ledger
from jinfercept.meter.prices import Prices
from jinfercept.request import Request
from jinfercept.sched.plan import StepResult
from jinfercept.sched.plan_builder import Counters, Planned
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sim.scripted import PlayedRun, returned_tokens

Report = dict[str, Any]
"""What `RunStats.report` returns, ready for JSON."""


@final
class RunStats:
    """Adds up the steps of one engine (its `observe` hook) and reports them.

    Args:
        scheduler: the engine's.
        clock: the engine's.
        prices: of plans.
        largest_step: query tokens of the largest executable.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock, prices: Prices, largest_step: int) -> None:
        self._clock, self._prices, self._largest_step = clock, prices, largest_step
        self._ledger = Ledger(scheduler.kv, prices, scheduler.running, clock.now())
        self.iterations = 0
        self.measured_s: defaultdict[int, float] = defaultdict(float)  # by bucket
        self.priced_s: defaultdict[int, float] = defaultdict(float)
        self.compute_s = self.recompute_s = self.recompute_latency_s = 0.0

    def __call__(self, planned: Planned, result: StepResult) -> None:
        step_s = self._ledger.step(planned, result, self._clock.now()).total_s
        price, bucket = self._prices(planned.plan), planned.plan.bucket
        self.iterations += 1
        self.measured_s[bucket] += step_s
        self.priced_s[bucket] += price.compute_s + price.stall_s
        self.compute_s += price.compute_s
        if planned.recomputed_tokens:
            self.recompute_s += self._prices.recompute_s(planned)
            self.recompute_latency_s += len(planned.recomputing) * step_s

    def settle(self) -> None:
        """A step's events were handled: contexts that they paused hold memory from now on."""
        self._ledger.settle(self._clock.now())

    def report(
        self, played: PlayedRun, requests: Sequence[tuple[float, Request]], counters: Counters, kv_tokens: int
    ) -> Report:
        """The run in numbers. Every request is in the means: what was given up counts with the time that it has had so far,
        spread over the tokens that it was to get, which is less than its latency would have become.

        Args:
            played: the run.
            requests: what was played, with the second at which each arrived.
            counters: the scheduler's.
            kv_tokens: of the device pool.
        """
        asked = {request.id: (at_s, request) for at_s, request in requests}
        paper, strict, first, alive_s = [], [], [], 0.0
        for output in (*played.outputs, *played.given_up):
            at_s, request = asked[output.request_id]
            arrival_s = played.started_s + at_s
            completion, metrics = output.outputs[0], output.metrics
            generated, tokens = completion.num_generated, len(completion.token_ids)
            if completion.finish_reason not in ("stop", "length"):
                generated = request.params.max_tokens or generated
                tokens = generated + returned_tokens(request)
            served_s = metrics.finished_s - arrival_s - metrics.intercepted_s
            alive_s += served_s
            paper.append(1e3 * served_s / tokens)
            strict.append(1e3 * served_s / generated)
            first.append((metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s) - arrival_s)
        waste = asdict(self._ledger.waste)
        return {
            "step_tokens": self._largest_step,
            "requests": len(requests),
            "normalized_latency_paper_ms_per_token": _summary(paper),
            "normalized_latency_ms_per_token": _summary(strict),
            "ttft_s": _summary(first),
            "completed_per_s": len(played.outputs) / played.seconds if played.seconds else 0.0,
            "unfinished": len(requests) - len(played.outputs),
            "iterations": self.iterations,
            "recomputed_tokens": counters.recomputed,
            "copied_out_tokens": counters.copied_out,
            "copied_in_tokens": counters.copied_in,
            "preemptions": counters.preemptions,
            "waste_token_s": waste,
            "waste_fraction": sum(waste.values()) / (kv_tokens * played.seconds or 1.0),
            "recompute_share": {
                "forward_time": self.recompute_s / (self.compute_s or 1.0),
                "request_latency": self.recompute_latency_s / (alive_s or 1.0),
            },
            "step_s": {"measured": sum(self.measured_s.values()), "priced": sum(self.priced_s.values())},
            "slowness": {
                str(size): self.measured_s[size] / seconds for size, seconds in self.priced_s.items() if seconds
            },
            "simulated_s": played.seconds,
            "sim_wall_s": played.wall_s,
        }


def _summary(values: list[float]) -> dict[str, float | None]:
    """Mean and percentiles; None where nothing was finished."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    values = sorted(values)
    return {
        "mean": fmean(values),
        "p50": values[len(values) // 2],
        "p99": values[min(len(values) - 1, len(values) * 99 // 100)],
    }
