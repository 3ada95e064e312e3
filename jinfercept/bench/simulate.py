"""One simulated run: a workload, a profile and a policy in; latencies, waste and counts out. Imports no JAX."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jinfercept.bench.arrivals import Arrival
from jinfercept.bench.simulator import PricedRunner, VirtualClock, VirtualEndpoints
from jinfercept.bench.workload import Script
from jinfercept.engine import Engine
from jinfercept.errors import ConfigError
from jinfercept.intercept.detector import ScriptedDetector
from jinfercept.kv.manager import KVManager
from jinfercept.request import Call, Finished, Request, RequestOutput, SamplingParams
from jinfercept.sched.draft import Planned
from jinfercept.sched.estimator import ESTIMATORS, Estimator, OracleEstimator
from jinfercept.sched.plan import StepResult
from jinfercept.sched.policies import SETTINGS, Knowledge, check_name
from jinfercept.sched.policy import swap
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import Scheduler

SIMULATED_ESTIMATORS: dict[str, Callable[[], Estimator]] = ESTIMATORS | {"oracle": OracleEstimator}
BOUNDS = ("bound", "free_pause")
"""Not policies but what none can beat: infinite memory; intercepted contexts that leave and come back at no cost."""

Progress = Callable[[float, float], None]
"""Told simulated seconds so far, and the most there can be."""


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    Attributes:
        profile: the machine.
        policy: a name of `sched.policies.SETTINGS`, or of `BOUNDS`.
        estimator: a name of `sched.estimator.ESTIMATORS`, or `oracle`.
        duration_s: arrivals come for so long, and have as long again to finish.
        kv_tokens, host_tokens: the two pools.
        page_size: tokens per page.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens per sequence.
        chunked_prefill: None: as the policy was published.
    """

    profile: Profile
    policy: str
    estimator: str = "elapsed"
    duration_s: float = 1200.0
    kv_tokens: int = 53_000
    host_tokens: int = 300_000
    page_size: int = 16
    max_num_seqs: int = 1024
    max_model_len: int = 4096
    chunked_prefill: bool | None = None

    def __post_init__(self) -> None:
        if self.policy not in BOUNDS:
            check_name(self.policy)
        if self.estimator not in SIMULATED_ESTIMATORS:
            raise ConfigError("no such estimator", got=self.estimator, fix=f"one of {', '.join(SIMULATED_ESTIMATORS)}")
        if self.kv_tokens < self.max_model_len and self.policy != "bound":
            raise ConfigError(
                "a sequence must fit", got=f"kv_tokens={self.kv_tokens}", fix=f"at least {self.max_model_len}"
            )

    def run(self, arrivals: list[Arrival], progress: Progress = lambda now, end: None) -> dict[str, Any]:
        """Play the arrivals; returns the report (`_report` names its keys)."""
        return _Run(self, arrivals).play(progress)


class _Run:
    """A simulation while it runs."""

    def __init__(self, options: Simulation, arrivals: list[Arrival]) -> None:
        self.options, self.arrivals = options, arrivals
        self.clock = VirtualClock()
        self.outputs: list[RequestOutput] = []
        self.compute_s = self.recompute_s = 0.0
        self.preserve_waste = self.recompute_waste = self.stall_waste = 0.0
        self.recompute_latency_s = 0.0
        self.iterations = 0
        profile, bound = options.profile, options.policy == "bound"
        size = options.page_size
        setting = SETTINGS["lru" if bound else "swap" if options.policy == "free_pause" else options.policy]
        estimator = SIMULATED_ESTIMATORS[options.estimator]()
        known = Knowledge(profile, profile.saturation, size, estimator)
        policy = swap() if options.policy == "free_pause" else setting.make(known)
        chunked = setting.chunked_prefill if options.chunked_prefill is None else options.chunked_prefill
        chunked |= options.policy in BOUNDS
        self.kv = KVManager(
            (1 << 40) // size if bound else options.kv_tokens // size,
            (1 << 40) // size if options.policy == "free_pause" else options.host_tokens // size,
            size,
            prefix_caching=False,
        )
        most = profile.saturation if chunked else max(profile.saturation, options.max_model_len)
        self.scheduler = Scheduler(
            self.kv,
            policy,
            profile,
            estimator,
            buckets=tuple(range(1, most + 1)),
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            chunk_tokens=most,
            whole_prompts=not chunked,
        )
        self.runner = PricedRunner(
            profile,
            self.clock,
            size,
            synchronous=policy.synchronous and options.policy != "free_pause",
            free_transfers=options.policy == "free_pause",
        )
        self.engine = Engine(
            self.scheduler,
            self.runner,
            VirtualEndpoints(self.clock),
            self.clock,
            threading.Event(),
            depth=0,
            vocab_size=1 << 60,
            observe=self._observe,
        )

    def play(self, progress: Progress) -> dict[str, Any]:
        started, end_s = time.monotonic(), 2 * self.options.duration_s
        coming = iter(enumerate(self.arrivals))
        upcoming = next(coming, None)
        while (upcoming is not None or self.engine.has_work) and self.clock.time < end_s:
            while upcoming is not None and upcoming[1].at_s <= self.clock.time:
                self.engine.submit(request(upcoming[0], upcoming[1].script, told=self.options.estimator == "oracle"))
                upcoming = next(coming, None)
            self.clock.next_arrival_s = upcoming[1].at_s if upcoming is not None else float("inf")
            if not self.engine.has_work:
                self.clock.time = self.clock.next_arrival_s
                continue
            for event in self.engine.step():
                if isinstance(event, Finished):
                    self.outputs.append(event.output)
            if self.iterations % 1000 == 0:
                progress(self.clock.time, end_s)
        progress(end_s, end_s)
        return self._report(time.monotonic() - started)

    def _observe(self, planned: Planned, result: StepResult) -> None:
        """Account for one iteration's time and for the memory that was held without being used in it."""
        self.iterations += 1
        priced, size = self.runner.last, self.options.page_size
        occupancy = self.kv.occupancy()
        self.compute_s += priced.compute_s
        self.preserve_waste += occupancy.claimed * size * result.elapsed_s
        self.stall_waste += occupancy.used * size * priced.stall_s
        if planned.recomputed_tokens:
            plan, profile = planned.plan, self.options.profile
            without = profile.step_s(plan.num_tokens - planned.recomputed_tokens, 0)
            extra_s = profile.step_s(plan.num_tokens, 0) - without
            if plan.num_tokens == planned.recomputed_tokens:
                extra_s = priced.compute_s  # nobody else was served
            self.recompute_s += extra_s
            self.recompute_waste += occupancy.used * size * extra_s
            self.recompute_latency_s += len(planned.recomputing) * result.elapsed_s

    def _report(self, wall_s: float) -> dict[str, Any]:
        paper, strict, first, alive_s = [], [], [], 0.0
        for output in self.outputs:
            arrival = self.arrivals[int(output.request_id)].at_s
            completion, metrics = output.outputs[0], output.metrics
            served_s = metrics.finished_s - arrival - metrics.intercepted_s
            alive_s += served_s
            paper.append(1e3 * served_s / len(completion.token_ids))
            strict.append(1e3 * served_s / completion.num_generated)
            first.append((metrics.first_token_s or metrics.finished_s) - arrival)
        counters = self.scheduler.counters
        waste = {"preserve": self.preserve_waste, "recompute": self.recompute_waste, "stall": self.stall_waste}
        return {
            "policy": self.options.policy,
            "profile": self.options.profile.name,
            "requests": len(self.arrivals),
            "normalized_latency_paper_ms_per_token": _summary(paper),
            "normalized_latency_ms_per_token": _summary(strict),
            "ttft_s": _summary(first),
            "completed_per_s": len(self.outputs) / self.clock.time if self.clock.time else 0.0,
            "unfinished": len(self.arrivals) - len(self.outputs),
            "iterations": self.iterations,
            "recomputed_tokens": counters.recomputed,
            "copied_out_tokens": counters.copied_out,
            "copied_in_tokens": counters.copied_in,
            "preemptions": counters.preemptions,
            "waste_token_s": waste,
            "waste_fraction": sum(waste.values()) / (self.options.kv_tokens * self.clock.time or 1.0),
            "recompute_share": {
                "forward_time": self.recompute_s / (self.compute_s or 1.0),
                "request_latency": self.recompute_latency_s / (alive_s or 1.0),
            },
            "simulated_s": self.clock.time,
            "sim_wall_s": wall_s,
        }


def request(number: int, script: Script, told: bool = False) -> Request:
    """A scripted request. Its token ids are its number, so that no two share a page.

    Args:
        told: the engine is told how long each call will take.
    """
    calls = dict(_calls(script, told))
    params = SamplingParams(temperature=0.0, max_tokens=script.generated, ignore_eos=True)
    return Request(str(number), (number,) * script.prompt, params, detector=ScriptedDetector(calls))


def _calls(script: Script, told: bool) -> Iterator[tuple[int, list[Call]]]:
    generated = 0
    for segment in script.segments:
        generated += segment.decode
        if segment.call_s is not None:
            expected_s = segment.call_s if told else None
            yield generated, [Call(script.kind, f"{segment.call_s} {segment.returned}", expected_s=expected_s)]


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
