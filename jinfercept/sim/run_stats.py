"""Statistics of a run, real or simulated, by the same code: latencies, waste, counts, step times. Imports no JAX.

Seconds are those of the engine's clock. `engine.meter.ledger` counts waste: in a real run, too, it takes the seconds of
recomputation and of waiting for transfers from the profile's price of a plan. The report says how far these prices can be
trusted: `step_s` has the measured and the priced seconds of all steps, and `slowness` their ratio for each bucket.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, final

from jinfercept.engine.meter.counts import LatencyLimits
from jinfercept.engine.meter.ledger import Ledger, Prices
from jinfercept.engine.meter.request_log import LogEvent, Passed, RequestLog, Stepped
from jinfercept.request import Request
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sim.reports import percentiles
from jinfercept.sim.scripted import PlayedRun, RunSeconds, SessionClients, TurnRecord, ever_returns, returned_tokens

Report = dict[str, Any]
"""The numbers of a run, as JSON values."""


@final
class RunStats:
    """Adds up the steps of one engine from the events of its log, and reports them."""

    def __init__(
        self, log: RequestLog, scheduler: Scheduler, prices: Prices, largest_step: int, limits: LatencyLimits
    ) -> None:
        self._prices, self._largest_step, self._limits = prices, largest_step, limits
        self._ledger = Ledger(scheduler.kv, prices, scheduler.running, log.now())
        self._kv = scheduler.kv
        self.iterations = 0
        self.measured_s: defaultdict[int, float] = defaultdict(float)  # by bucket
        self.priced_s: defaultdict[int, float] = defaultdict(float)
        self.compute_s = self.recompute_s = self.recompute_latency_s = 0.0
        self.used_token_s = 0.0  # device memory of requests that run
        log.tell(self.fold)

    def fold(self, event: LogEvent) -> None:
        if isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Passed):
            self._ledger.settle(event.at_s)

    def _step(self, event: Stepped) -> None:
        planned = event.planned
        step_s = self._ledger.step(planned, event.result, event.at_s).total_s
        price, bucket = self._prices(planned.plan), planned.plan.bucket
        self.iterations += 1
        self.used_token_s += self._kv.occupancy().used * self._kv.page_size * step_s
        self.measured_s[bucket] += step_s
        self.priced_s[bucket] += price.compute_s + price.stall_s
        self.compute_s += price.compute_s
        if planned.recomputed_tokens:
            self.recompute_s += self._prices.recompute_s(planned)
            self.recompute_latency_s += len(planned.recomputing) * step_s

    def report(
        self,
        played: PlayedRun,
        requests: Sequence[tuple[float, Request]],
        counters: SchedulerCounters,
        kv_tokens: int,
        tenant_of: Mapping[str, str] | None = None,
        warm_up_s: float = 0.0,
    ) -> Report:
        """The run's report.

        Every request is in the means. An aborted one counts with its time so far over all tokens that it was to get, which is
        less than its latency would have been. Requests of clients that never come back (`abandoned`) are left out: they can
        neither finish nor be unfinished. `useful_tokens` are those of requests that finished.

        Args:
            requests: with the second at which each arrives.
            kv_tokens: tokens of the device pool.
            tenant_of: tenant of each request, by its id; with several tenants the report has their `tenant_ttft_s`.
            warm_up_s: requests that arrive in these first seconds are in no latency and in no goodput.
        """
        submitted = {request.id: (at_s, request) for at_s, request in requests}
        abandoned = {request.id for _, request in requests if not ever_returns(request)}
        paper, strict, first, latency, turns, alive_s, num_good = [], [], [], [], [], 0.0, 0
        tenant_of = tenant_of or {}
        tenants: dict[str, list[float]] = {tenant: [] for tenant in tenant_of.values()}
        for output in (*played.outputs, *played.aborted):
            at_s, request = submitted[output.request_id]
            arrival_s = played.lasted.started_s + at_s
            completion, metrics = output.outputs[0], output.metrics
            generated, tokens = completion.num_generated, len(completion.token_ids)
            if completion.finish_reason not in ("stop", "length"):
                generated = request.params.max_tokens or generated
                tokens = generated + returned_tokens(request)
            served_s = metrics.finished_s - arrival_s - metrics.intercepted_s
            alive_s += served_s
            if output.request_id in abandoned or at_s < warm_up_s:
                continue
            latency.append(metrics.finished_s - arrival_s)
            paper.append(1e3 * served_s / tokens)
            strict.append(1e3 * served_s / generated)
            first.append((metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s) - arrival_s)
            turns += [first[-1], *(pause.delay_s for pause in completion.interceptions if pause.delay_s is not None)]
            tenants.setdefault(tenant_of.get(output.request_id, ""), []).append(first[-1])
            in_time = self._limits.keeps(first[-1], 0, served_s - first[-1], generated)
            num_good += in_time and completion.finish_reason in ("stop", "length")
        seconds = played.lasted.seconds
        return {
            "step_tokens": self._largest_step,
            "requests": len(requests),
            "normalized_latency_paper_ms_per_token": _summary(paper),
            "normalized_latency_ms_per_token": _summary(strict),
            "ttft_s": _summary(first),
            "turn_delay_s": _summary(turns),
            "latency_s": _summary(latency),
            "completed_per_s": len(played.outputs) / seconds if seconds else 0.0,
            "goodput_per_s": num_good / seconds if seconds else 0.0,
            "limits": self._limits._asdict(),
            "unfinished": len(requests) - len(abandoned) - len(played.outputs),
            "abandoned": len(abandoned),
            "useful_tokens": sum(output.outputs[0].num_generated for output in played.outputs),
            **self._machine(counters, kv_tokens, alive_s, played.lasted),
        } | ({"tenant_ttft_s": tenants} if len(tenants) > 1 else {})

    def session_report(
        self,
        clients: SessionClients,
        lasted: RunSeconds,
        counters: SchedulerCounters,
        kv_tokens: int,
        warm_up_s: float = 0.0,
    ) -> Report:
        """The report of a run of sessions, in which every turn is a request.

        A turn without a first token at the end counts with its time until then, and so does an unfinished turn in the delay
        of its session. `within_limits_share` leaves out the unfinished turns that are within the limits so far. Turn delays
        and this share exclude time at the door, but for `turn_delay_with_door_s`; `door_s` is that of sessions. The delay of
        a session and its goodput include it. `warm_up_s` is as in `report`.
        """
        records = [record for record in clients.records if record.submitted_s >= warm_up_s]
        served = [record for record in records if record.finished]
        alive_s = sum(record.finished_s - record.submitted_s for record in clients.records)
        sessions, delays = defaultdict[int, float](float), defaultdict[int, list[float]](list)
        for record in records:
            sessions[record.session] += record.finished_s - record.submitted_s
            delays[record.session].append(record.delay_s)
        per_token = [1e3 * (record.finished_s - record.submitted_s) / max(1, record.generated) for record in served]
        seconds = max(0.0, lasted.seconds - warm_up_s)
        num_good = sum(self._keeps_limits(record, record.delay_s + record.door_s) for record in served)
        decided = [
            kept for record in records if not (kept := self._keeps_limits(record, record.delay_s)) or record.finished
        ]
        return {
            "step_tokens": self._largest_step,
            "requests": len(records),
            "turn_delay_s": _summary(record.delay_s for record in records),
            "door_s": _summary(record.door_s for record in records if not record.turn),
            "turn_delay_with_door_s": _summary(record.delay_s + record.door_s for record in records),
            "turn_delay_of_sessions_s": fmean(map(fmean, delays.values())) if delays else None,
            "longest_wait_s": max((record.delay_s for record in records), default=None),
            "unserved_share": sum(record.first_token_s is None for record in records) / (len(records) or 1),
            "within_limits_share": fmean(decided) if decided else None,
            "session_delay_s": _summary(sessions.values()),
            "sessions": clients.begun,
            "finished_sessions": clients.ended_sessions,
            "cached_share": sum(record.cached for record in records) / (sum(record.prompt for record in records) or 1),
            "lost_tokens": sum(record.lost for record in records),
            "normalized_latency_paper_ms_per_token": _summary(per_token),
            "latency_s": _summary(record.finished_s - record.submitted_s for record in records),
            "completed_per_s": len(served) / seconds if seconds else 0.0,
            "goodput_per_s": num_good / seconds if seconds else 0.0,
            "limits": self._limits._asdict(),
            "unfinished": len(records) - len(served),
            "useful_tokens": sum(record.generated for record in served),
            **self._machine(counters, kv_tokens, alive_s, lasted),
        }

    def _keeps_limits(self, record: TurnRecord, delay_s: float) -> bool:
        rest_s = record.finished_s - record.submitted_s - record.door_s - record.delay_s
        return self._limits.keeps(delay_s, record.new, rest_s, record.generated)

    def _machine(
        self, counters: SchedulerCounters, kv_tokens: int, alive_s: float, lasted: RunSeconds
    ) -> Mapping[str, Any]:
        waste = asdict(self._ledger.waste)
        return {
            "iterations": self.iterations,
            "recomputed_tokens": counters.recomputed,
            "copied_out_tokens": counters.copied_out,
            "copied_in_tokens": counters.copied_in,
            "returned_tokens": counters.returned,
            "kept_tokens": counters.kept,
            "preemptions": counters.preemptions,
            "waste_token_s": waste,
            "memory_token_s": {"running": self.used_token_s, "paused": waste["preserve"]},
            "waste_fraction": sum(waste.values()) / (kv_tokens * lasted.seconds or 1.0),
            "recompute_share": {
                "forward_time": self.recompute_s / (self.compute_s or 1.0),
                "request_latency": self.recompute_latency_s / (alive_s or 1.0),
            },
            "step_s": {"measured": sum(self.measured_s.values()), "priced": sum(self.priced_s.values())},
            "slowness": {
                str(size): self.measured_s[size] / seconds for size, seconds in self.priced_s.items() if seconds
            },
            "simulated_s": lasted.seconds,
            "sim_wall_s": lasted.wall_s,
        }


def _summary(values: Iterable[float]) -> Mapping[str, float | None]:
    return percentiles(values, (50, 90, 99)) or dict.fromkeys(("mean", "p50", "p90", "p99"))
