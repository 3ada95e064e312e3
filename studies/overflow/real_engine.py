"""Batches that overflow the KV pool of the real engine on this machine, and the same in the simulator under its prices.

One setup for each page size and way of copying is loaded and compiled; pools of all sizes share it, since a scheduler may be
given fewer pages than there are. Prompts are random tokens; no tokenizer takes part.

On a CPU a plan is collected before the next one is made, so that the seconds of a step are its own.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, final

import jax

from jinfercept.engine.meter.ledger import Prices
from jinfercept.engine.protocols import RealClock
from jinfercept.kv.manager import KVManager
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sim.scripted import plain_tokens, random_tokens
from jinfercept.sim.simulator import PricedRunner, VirtualClock
from jinfercept.start.compile_cache import CompileCounter
from jinfercept.start.profiler import EFFORTS, Effort, measure
from jinfercept.start.start import EngineSetup, set_up
from studies.overflow.batch_run import (
    AUTO,
    OUR_RECOMPUTE,
    OUR_SWAP,
    OUR_SWAP_BY_PAGE,
    BatchRequest,
    BatchRun,
    Overflow,
    OverflowMode,
    at_once,
    play_batch,
)
from studies.overflow.figures import OverflowSizes

DUMMY = "dummy"
"""Name of `DUMMY_MODEL`."""
DUMMY_MODEL = ModelConfig(
    family="llama",
    vocab_size=2048,
    hidden_size=256,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    ffn_size=688,
    norm_eps=1e-5,
    rope=RopeConfig(10_000.0, 32, scaling="yarn", factor=16.0, original_max_position=4096, attention_factor=1.2773),
    tie_embeddings=False,
    max_position=65_536,
    eos_token_ids=(),
    activation="silu",
)
"""Yarn-Llama-2-7B-64k made small: 8 layers, 16 KiB of KV a token in float32; its weights are random."""
MODES = (OUR_RECOMPUTE, OUR_SWAP_BY_PAGE, OUR_SWAP, AUTO)
OVER_TIME = (OUR_RECOMPUTE, OUR_SWAP_BY_PAGE)
SIZES = OverflowSizes(
    page_sizes=(8, 32),
    evicted=(128, 256, 512),
    lengths=(64, 128, 192),
    batch=at_once(16, 48, 32, page_size=8),
    shares=(0.1, 0.2, 0.3, 0.5, 0.7),
    seeds=3,
    repeats=3,
)
"""The poster's 32 requests with a 40th of the tokens, three quarters of them output, so that as many are preempted as in its
runs: contexts that grow by a few pages overflow rarely. Pools are shares of the demand here too."""
MODEL_SIZES = SIZES._replace(
    evicted=(128, 384),
    lengths=(32, 64),
    batch=at_once(16, 48, 12, page_size=8),
    shares=(0.2, 0.4, 0.6),
    repeats=1,
)
"""For a real model, a step of which takes twenty times as long as one of `DUMMY_MODEL`."""
QUICK_SIZES = SIZES._replace(
    evicted=(128, 256),
    lengths=(32, 64),
    batch=at_once(16, 32, 12, page_size=8),
    shares=(0.2, 0.4),
    repeats=1,
)
MAX_NUM_SEQS = 32
UNUSED_PROFILE = "paper-gptj-6b-a100"
"""So that the start measures none: `OverflowEngine` does, by its own clock."""
EFFORT = EFFORTS["measure"]
"""Of the profile: a step runs as often as a step of a figure does, so that the fastest of both are as fast."""
QUICK_EFFORT = EFFORT._replace(rounds=3, contexts=(0.0, 1.0), pages=(1, 8, 32))
MOST_STAGED = 4
"""Pages of one array where copies are coalesced."""


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process on one core, so that processor seconds are those of the work.

    With several, the threads of a product of matrices turn while they wait for each other and for the host, and their turning
    counts. It has an effect on a backend of JAX that starts within; where the system knows no affinity, it has none.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@final
class OverflowEngine:
    """The real engine with setups of one model, made when a page size or a way of copying is first asked for.

    Copies by layer: an array for each page and layer, as vLLM copied in 2024 but for keys and values, which share one here.
    Coalesced: arrays of up to `MOST_STAGED` pages with all layers. A page is copied while other layers compute; on a CPU both
    take turns on the same cores.

    Args:
        model: `DUMMY`, a model as `LLM` takes one, or a shape, whose weights are random.
        sizes: of the batches that it will serve.
        effort: of the profile.
        clock: of runs and profile: seconds.
        options: of the engine, by the names of `config.py`.
    """

    def __init__(
        self,
        model: str | ModelConfig,
        sizes: OverflowSizes,
        *,
        effort: Effort = EFFORT,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self._model = DUMMY_MODEL if model == DUMMY else model
        self._effort = effort
        self._clock = clock
        depth = {"pipeline_depth": 0} if jax.default_backend() == "cpu" else {}
        self._options: dict[str, Any] = (
            {"dtype": "float32", "max_num_batched_tokens": 128, "swap_space": 1.0} | depth | options
        )
        batches = max(MAX_NUM_SEQS * max(sizes.lengths), MAX_NUM_SEQS * sum(sizes.batch.requests[0]))
        self._longest = max(
            max(sizes.evicted) + 8 * max(sizes.page_sizes), max(sizes.lengths), sum(sizes.batch.requests[0])
        )
        self._kv_tokens = max(batches, 2 * self._longest) + MAX_NUM_SEQS * max(sizes.page_sizes)
        self._setups: dict[tuple[int, bool, bool], EngineSetup] = {}
        self._host_s = 0.0
        self._counter = CompileCounter()

    def run(self, mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
        """Serve the requests in real time; nothing is compiled meanwhile.

        Args:
            seed: of the prompts' tokens.
        """
        setup = self.setup(mode, overflow.page_size)
        compiled = self._counter.count
        run = self._play(setup, mode, overflow, seed)
        assert self._counter.count == compiled, "something was compiled inside the clock"
        return run

    def simulated(self, mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
        """The same plans, priced by the profile that the setup measured at its start, and the engine's own work.

        On a CPU compute hides no copy.
        """
        return self._priced(self.setup(mode, overflow.page_size), mode, overflow, self._host_s)

    def _priced(self, setup: EngineSetup, mode: OverflowMode, overflow: Overflow, host_s: float) -> BatchRun:
        clock, config = VirtualClock(), setup.config.advanced
        is_cpu = jax.default_backend() == "cpu"
        prices = Prices(setup.profile, overflow.page_size, synchronous=is_cpu)
        return play_batch(
            _scheduler(setup, mode, overflow),
            PricedRunner(prices, clock),
            clock,
            overflow.requests,
            plain_tokens,
            depth=config.pipeline_depth,
            vocab_size=1 << 60,
            host_s=host_s,
        )

    @property
    def machine(self) -> str:
        """Its processor, in a few words."""
        return f"{os.cpu_count()} cores, {platform.machine()}"

    def setup(self, mode: OverflowMode, page_size: int) -> EngineSetup:
        """The setup of a mode and page size, warm."""
        key = page_size, mode.by_layer, mode.pinned
        if key not in self._setups:
            self._setups[key] = self._warm(page_size, by_layer=mode.by_layer, pinned=mode.pinned)
        return self._setups[key]

    def close(self) -> None:
        """Free every setup."""
        for setup in self._setups.values():
            setup.close()
        self._counter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _warm(self, page_size: int, *, by_layer: bool, pinned: bool) -> EngineSetup:
        """A compiled setup that has served a batch with overflow in it."""
        setup = set_up(
            self._model,
            load_format="dummy" if isinstance(self._model, ModelConfig) else "auto",
            page_size=page_size,
            kv_tokens=-(-self._kv_tokens // page_size + 1) * page_size,
            max_model_len=self._longest,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=False,
            layers_per_step=1,
            staging_pages=1 if by_layer else MOST_STAGED,
            pinned_memory=pinned,
            profile=UNUSED_PROFILE,
            **self._options,
        )
        warm = Overflow((BatchRequest(2 * page_size, page_size + 8),) * 3, page_size, pool_pages=8)
        for preemption in ("recompute", "swap"):
            self._play(setup, OverflowMode("", preemption, "ours", by_layer, pinned), warm, 0)
        plan = setup.memory_plan
        with setup.settings():
            profile = measure(
                setup.runner,
                setup.shape,
                name=setup.model.config.family,
                kv_bytes_per_token=plan.token_bytes(page_size),
                effort=self._effort,
                settings={},
                clock=self._clock,
            )
        setup = replace(setup, profile=profile)
        self._host_s = self._host_s or self._measure_host(setup, warm)
        return setup

    def _measure_host(self, setup: EngineSetup, overflow: Overflow) -> float:
        """Seconds of the engine's own work in a step: what a run takes whose plans are priced only. The fastest of a few."""
        per_step_s = list[float]()
        for _ in range(self._effort.rounds):
            started_s = self._clock()
            run = self._priced(setup, AUTO, overflow, 0.0)
            per_step_s.append((self._clock() - started_s) / len(run.steps))
        return min(per_step_s)

    def _play(self, setup: EngineSetup, mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
        vocab_size, runner = setup.model.config.vocab_size, setup.runner
        with setup.settings():
            try:
                return play_batch(
                    _scheduler(setup, mode, overflow),
                    runner,
                    RealClock(),
                    overflow.requests,
                    random_tokens(vocab_size, seed),
                    depth=setup.config.advanced.pipeline_depth,
                    vocab_size=vocab_size,
                    timer=self._clock,
                )
            finally:
                runner.reset()


def _scheduler(setup: EngineSetup, mode: OverflowMode, overflow: Overflow) -> Scheduler:
    """A scheduler of as many of the setup's pages as the pool has."""
    shape = setup.shape
    limits = SchedulerLimits(shape.buckets, shape.max_num_seqs, shape.max_model_len, preemption=mode.preemption)
    build = plan_scheduler(setup.profile, ElapsedEstimator(), "copy_ahead", limits, shape.page_size)
    pages = shape.num_pages if overflow.pool_pages is None else overflow.pool_pages
    assert pages <= shape.num_pages
    kv = KVManager(pages, setup.memory_plan.host_tokens // shape.page_size, shape.page_size, prefix_caching=False)
    return build.build(kv)
