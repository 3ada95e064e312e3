"""Batches that overflow the KV pool of the real engine on this machine, and the same in the simulator under its prices.

One setup for each page size and way of copying is loaded and compiled; pools of all sizes share it, since a scheduler may be
given fewer pages than there are. Prompts are random tokens; no tokenizer takes part.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, final

from jinfercept.engine.clock import RealClock
from jinfercept.kv.manager import KVManager
from jinfercept.meter.prices import Prices
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sim.batch_run import BatchRequest, BatchRun, play_batch
from jinfercept.sim.overflow import AUTO, OUR_RECOMPUTE, OUR_SWAP, OUR_SWAP_BY_LAYER, Overflow, OverflowMode, at_once
from jinfercept.sim.overflow_figures import OverflowSizes
from jinfercept.sim.scripted import plain_tokens, random_tokens
from jinfercept.sim.simulator import PricedRunner, VirtualClock
from jinfercept.startup.compile_counter import CompileCounter
from jinfercept.startup.profiler import EFFORTS, measure
from jinfercept.startup.start import EngineSetup, set_up

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
MODES = (OUR_RECOMPUTE, OUR_SWAP_BY_LAYER, OUR_SWAP, AUTO)
OVER_TIME = (OUR_RECOMPUTE, OUR_SWAP_BY_LAYER)
SIZES = OverflowSizes(
    page_sizes=(4, 8, 16, 32, 64),
    evicted=(128, 256, 512, 1024),
    lengths=(64, 128, 192, 256),
    batch=at_once(94, 64, 16, page_size=8),
    shares=(0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    seeds=3,
    repeats=2,
)
"""The poster's batch with a sixteenth of the tokens and half of the requests: pools are shares of the demand here too."""
QUICK_SIZES = SIZES._replace(
    page_sizes=(8, 32),
    evicted=(128, 512),
    lengths=(64, 128),
    batch=at_once(48, 32, 8, page_size=8),
    shares=(0.2, 0.5),
    repeats=2,
)
MAX_NUM_SEQS = 16
UNUSED_PROFILE = "paper-gptj-6b-a100"
"""So that the start measures none: `OverflowEngine` does, by its own clock."""
MOST_STAGED = 4
"""Pages of one array where copies are coalesced."""


@final
class OverflowEngine:
    """The real engine with setups of one model, made when a page size or a way of copying is first asked for.

    Copies by layer: an array for each page and layer, as vLLM copied in 2024 but for keys and values, which share one here.
    Coalesced: arrays of up to `MOST_STAGED` pages with all layers. A page is copied while other layers compute; on a CPU both
    take turns on the same cores.

    Args:
        model: `DUMMY`, or a model as `LLM` takes one.
        sizes: of the batches that it will serve.
        effort: of the profile: a name of `startup.profiler.EFFORTS`.
        clock: of runs and profile: seconds.
        options: of the engine, by the names of `config.py`.
    """

    def __init__(
        self,
        model: str,
        sizes: OverflowSizes,
        *,
        effort: str = "measure",
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> None:
        self._model = model
        self._effort = EFFORTS[effort]
        self._clock = clock
        self._options: dict[str, Any] = {"max_num_batched_tokens": 128} | options
        batches = max(MAX_NUM_SEQS * max(sizes.lengths), MAX_NUM_SEQS * sum(sizes.batch.requests[0]))
        self._longest = max(
            max(sizes.evicted) + 8 * max(sizes.page_sizes), max(sizes.lengths), sum(sizes.batch.requests[0])
        )
        self._kv_tokens = max(batches, 2 * self._longest) + MAX_NUM_SEQS * max(sizes.page_sizes)
        self._setups: dict[tuple[int, bool], EngineSetup] = {}
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
        """The same plans, priced by the profile that the setup measured at its start; on a CPU compute hides no copy."""
        setup, clock = self.setup(mode, overflow.page_size), VirtualClock()
        prices = Prices(setup.machine.profile, overflow.page_size, synchronous=True)
        scheduler = _scheduler(setup, mode, overflow)
        depth, runner = setup.config.advanced.pipeline_depth, PricedRunner(prices, clock)
        return play_batch(scheduler, runner, clock, overflow.requests, plain_tokens, depth=depth, vocab_size=1 << 60)

    @property
    def machine(self) -> str:
        """Its processor, in a few words."""
        return f"{os.cpu_count()} cores, {platform.machine()}"

    def setup(self, mode: OverflowMode, page_size: int) -> EngineSetup:
        """The setup of a mode and page size, warm."""
        key = page_size, mode.by_layer
        if key not in self._setups:
            self._setups[key] = self._warm(page_size, by_layer=mode.by_layer)
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

    def _warm(self, page_size: int, *, by_layer: bool) -> EngineSetup:
        """A compiled setup that has served a batch with overflow in it."""
        is_dummy = self._model == DUMMY
        setup = set_up(
            DUMMY_MODEL if is_dummy else self._model,
            load_format="dummy" if is_dummy else "auto",
            dtype="float32",
            page_size=page_size,
            kv_tokens=-(-self._kv_tokens // page_size + 1) * page_size,
            max_model_len=self._longest,
            max_num_seqs=MAX_NUM_SEQS,
            swap_space=1.0,
            enable_prefix_caching=False,
            layers_per_step=1,
            transfer_parts=10**6 if by_layer else 1,
            staging_pages=1 if by_layer else MOST_STAGED,
            profile=UNUSED_PROFILE,
            **self._options,
        )
        warm = Overflow((BatchRequest(2 * page_size, page_size + 8),) * 3, page_size, pool_pages=8)
        for preemption in ("recompute", "swap"):
            self._play(setup, OverflowMode("", preemption, "ours", by_layer), warm, 0)
        machine, plan = setup.machine, setup.memory_plan
        profile = measure(
            machine.runner,
            machine.shape,
            name=self._model,
            kv_bytes_per_token=plan.token_bytes(page_size),
            effort=self._effort,
            settings={},
            clock=self._clock,
        )
        return replace(setup, machine=replace(machine, profile=profile))

    def _play(self, setup: EngineSetup, mode: OverflowMode, overflow: Overflow, seed: int) -> BatchRun:
        vocab_size, runner = setup.model.config.vocab_size, setup.machine.runner
        started_s = self._clock()
        try:
            run = play_batch(
                _scheduler(setup, mode, overflow),
                runner,
                RealClock(),
                overflow.requests,
                random_tokens(vocab_size, seed),
                depth=setup.config.advanced.pipeline_depth,
                vocab_size=vocab_size,
            )
            return run._replace(seconds=self._clock() - started_s)
        finally:
            runner.reset()


def _scheduler(setup: EngineSetup, mode: OverflowMode, overflow: Overflow) -> Scheduler:
    """A scheduler of as many of the setup's pages as the pool has."""
    shape = setup.machine.shape
    limits = SchedulerLimits(shape.buckets, shape.max_num_seqs, shape.max_model_len, preemption=mode.preemption)
    build = plan_scheduler(setup.machine.profile, ElapsedEstimator(), "copy_ahead", limits, shape.page_size)
    pages = shape.num_pages if overflow.pool_pages is None else overflow.pool_pages
    assert pages <= shape.num_pages
    kv = KVManager(pages, setup.memory_plan.host_tokens // shape.page_size, shape.page_size, prefix_caching=False)
    return build.build(kv)
