"""Requests that arrive at once, played on an engine whose device pool may be too small for them, under the ways of handling it.

No request calls out: what overflows are running requests. The simulated set-up is that of the poster "Uncover the Overhead and
Resource Usage for Handling KV Cache Overflow in LLM Inference" (SC24): Yarn-Llama-2-7B-64k on a 40 GB A100 under vLLM. Its
engine of 2024 computes whole prompts before it decodes, copies the keys and the values of every page and layer in pieces of
their own, and waits for its copies. Imports no JAX.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, final

from jinfercept.engine.dispatcher import Clock
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.ledger import Prices
from jinfercept.engine.meter.request_log import LogEvent, RequestLog, Stepped
from jinfercept.kv.manager import KVManager
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.plan_builder import SchedulerCounters
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits, plan_scheduler
from jinfercept.sched.transfers import Preemption
from jinfercept.sim.scripted import ScriptedDispatcher, make_request, plain_tokens, play
from jinfercept.sim.simulation import PricedRunner, VirtualClock
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
    """

    at_s: float
    prompt_tokens: int
    decode_tokens: int
    used_pages: int


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

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.steps: list[BatchStep] = []
        self._scheduler, self._clock = scheduler, clock

    def __call__(self, event: LogEvent) -> None:
        if not isinstance(event, Stepped):
            return
        plan = event.planned.plan
        sizes = [len(chunk.tokens) for chunk in plan.chunks]
        decoded = sizes.count(1)
        self.steps.append(
            BatchStep(
                self._clock.now(),
                sum(sizes) - decoded,
                decoded,
                self._scheduler.kv.occupancy().used,
            )
        )


ENDLESS_TOKENS = 1 << 40
MACHINE = "roofline-yarn-llama-2-7b-64k-a100-40gb"
NUM_LAYERS = 32

COPY_S = 2.3e-6
"""Seconds of a `cudaMemcpyAsync` beside those of its bytes, as others measured on an H20 (github.com/taco-project/FlexKV, pull
request 193). With 26 GB/s a copy of 24 KiB then reaches 7.6 GB/s; 4 to 7 GB/s are reported for copies of 4 to 24 KiB."""
PAGEABLE_SHARE = 0.4
"""Bandwidth of pageable memory over that of pinned memory: an estimate, after NVIDIA's 2.3 and 5.6 GB/s on an older link
("How to Optimize Data Transfers in CUDA C/C++")."""


class OverflowMode(NamedTuple):
    """A way of handling overflow.

    Attributes:
        name: in tables.
        preemption: what becomes of a preempted sequence's pages.
        engine: "2024": whole prompts first, and steps wait for copies; "ours": chunked prefill, and compute hides copies.
        by_layer: a copy carries the keys or the values of one page and layer; else everything that a step moves one way.
        pinned: host memory is page-locked.
    """

    name: str
    preemption: Preemption
    engine: Literal["2024", "ours"]
    by_layer: bool = False
    pinned: bool = True


RECOMPUTE_2024 = OverflowMode("recompute", "recompute", "2024")
SWAP_PAGEABLE = OverflowMode("swap, pageable", "swap", "2024", by_layer=True, pinned=False)
SWAP_PINNED = OverflowMode("swap, pinned", "swap", "2024", by_layer=True)
SWAP_COALESCED = OverflowMode("swap, coalesced", "swap", "2024")
OUR_RECOMPUTE = OverflowMode("our recompute", "recompute", "ours")
OUR_SWAP = OverflowMode("our swap", "swap", "ours")
AUTO = OverflowMode("auto", "auto", "ours")


class Overflow(NamedTuple):
    """Requests, all at once, and the pool that they have.

    Attributes:
        requests: in the order of arrival.
        page_size: tokens per page.
        pool_pages: of the device; None: as many as they want.
    """

    requests: tuple[BatchRequest, ...]
    page_size: int
    pool_pages: int | None

    @property
    def demand_pages(self) -> int:
        """Pages of all requests at their ends."""
        return sum(-(-request.tokens // self.page_size) for request in self.requests)


def linked(profile: Profile, mode: OverflowMode, page_size: int) -> Profile:
    """The profile with the link of a mode: `t_swap = copies · (c0 + bytes / bandwidth)`.

    Args:
        profile: with a link of pinned memory, and no seconds per copy.
        page_size: tokens per page.
    """
    share = 1.0 if mode.pinned else PAGEABLE_SHARE
    return replace(
        profile,
        link_out_tokens_per_s=profile.link_out_tokens_per_s * share,
        link_in_tokens_per_s=profile.link_in_tokens_per_s * share,
        link_both_tokens_per_s=profile.link_both_tokens_per_s * share,
        copy_s=COPY_S,
        copy_tokens=page_size / (2 * NUM_LAYERS) if mode.by_layer else 0.0,
    )


def simulate(mode: OverflowMode, overflow: Overflow, machine: str = MACHINE) -> BatchRun:
    """Serve the requests on the simulated machine.

    Args:
        machine: a named profile.
    """
    page_size, longest = overflow.page_size, max(sum(request) for request in overflow.requests)
    profile, chunked = linked(load_profile(machine), mode, page_size), mode.engine == "ours"
    pages = ENDLESS_TOKENS if overflow.pool_pages is None else overflow.pool_pages
    largest = profile.saturation if chunked else max(profile.saturation, longest)
    limits = SchedulerLimits(
        tuple(range(1, largest + 1)),
        max_num_seqs=len(overflow.requests),
        max_model_len=longest,
        chunked_prefill=chunked,
        preemption=mode.preemption,
    )
    policy = "copy_ahead" if chunked else "swap"  # which decides nothing here but whether steps wait
    build = plan_scheduler(profile, ElapsedEstimator(), policy, limits, page_size)
    scheduler = build.build(KVManager(pages, 2 * overflow.demand_pages, page_size, prefix_caching=False))
    clock = VirtualClock()
    dispatcher, steps, log = ScriptedDispatcher(clock, plain_tokens), _Steps(scheduler, clock), RequestLog(clock.now)
    log.tell(steps)
    lifecycle = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=1 << 60)
    runner = PricedRunner(Prices(profile, page_size, synchronous=not chunked), clock)
    engine = Engine(lifecycle, runner, threading.Event(), depth=0)
    engine.observe(log)
    scripts = [Script("batch", request.prompt, (Segment(request.output, None, 0),)) for request in overflow.requests]
    coming = [(0.0, make_request(number, script, plain_tokens)) for number, script in enumerate(scripts)]
    try:
        played = play(engine, dispatcher, clock, coming, MOST_S)
    finally:
        engine.close()
    assert len(played.outputs) == len(scripts), "a request was not served"
    streams = {output.request_id: output.outputs[0].token_ids for output in played.outputs}
    return BatchRun(steps.steps[-1].at_s, scheduler.counters, steps.steps, streams)


def shared(overflow: Overflow, share: float) -> Overflow:
    """The same with a pool of a share of the demand, but enough for the longest request."""
    longest = max(-(-sum(request) // overflow.page_size) for request in overflow.requests)
    return overflow._replace(pool_pages=max(longest, round(share * overflow.demand_pages)))


def at_once(prompt: int, output: int, count: int, page_size: int = 16) -> Overflow:
    """So many equal requests, and a pool for all of them."""
    return Overflow((BatchRequest(prompt, output),) * count, page_size, None)
