"""Batches that overflow the KV pool of a simulated machine, under the ways of handling it. Imports no JAX.

The set-up is that of the poster "Uncover the Overhead and Resource Usage for Handling KV Cache Overflow in LLM Inference"
(SC24): Yarn-Llama-2-7B-64k on a 40 GB A100 under vLLM. Its engine of 2024 computes whole prompts before it decodes, copies the
keys and the values of every page and layer in pieces of their own, and waits for its copies.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from jinfercept.kv.manager import KVManager
from jinfercept.meter.ledger import Prices
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.preemption import Preemption
from jinfercept.sched.profile import Profile
from jinfercept.sim.scripted import plain_tokens
from jinfercept.sim.simulator import PricedRunner, VirtualClock
from studies.overflow.batch_run import BatchRequest, BatchRun, play_batch

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
        by_layer: a copy carries the keys or the values of one page and layer, on the real engine those of one page; else
            everything that a step moves one way.
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
OUR_SWAP_BY_PAGE = OverflowMode("our swap by page", "swap", "ours", by_layer=True)
OUR_SWAP_PAGEABLE = OverflowMode("our swap by page, pageable", "swap", "ours", by_layer=True, pinned=False)
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
    runner = PricedRunner(Prices(profile, page_size, synchronous=not chunked), clock)
    return play_batch(scheduler, runner, clock, overflow.requests, plain_tokens, depth=0, vocab_size=1 << 60)


def shared(overflow: Overflow, share: float) -> Overflow:
    """The same with a pool of a share of the demand, but enough for the longest request."""
    longest = max(-(-sum(request) // overflow.page_size) for request in overflow.requests)
    return overflow._replace(pool_pages=max(longest, round(share * overflow.demand_pages)))


def at_once(prompt: int, output: int, count: int, page_size: int = 16) -> Overflow:
    """So many equal requests, and a pool for all of them."""
    return Overflow((BatchRequest(prompt, output),) * count, page_size, None)
