"""Pools are sized by what a device has, executables by what it serves; what cannot work is refused with what, got and fix."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jinfercept.config import EngineConfig
from jinfercept.cpu_kernels.machine import Memory
from jinfercept.errors import ConfigError
from jinfercept.models.load import Loaded, load
from jinfercept.models.mesh import local_bytes
from jinfercept.models.model import Model, abstract_params, kv_bytes_per_token
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.runner.steps import step_bytes
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.start import memory, sizing
from jinfercept.start.backend import start_backend
from jinfercept.start.memory import (
    GIB,
    MOVED_BYTES,
    FreeMemory,
    MemoryPlan,
    check_weights,
    largest_product_bytes,
    most_at_once,
    plan_memory,
)
from jinfercept.start.side_pools import NO_STATES, NO_WINDOW_PLAN, StatePlan, WindowPlan
from jinfercept.start.sizing import buckets, check_tables, staging_pages
from tests.support.tiny_model import GOLDEN, tiny_llm

LOADED = load(GOLDEN / "llama_gqa", dtype="float32")


TOKEN_BYTES = kv_bytes_per_token(LOADED.model.config, "float32")


class Counted:
    """A device with memory of its own."""

    def __init__(self, stats: Mapping[str, int] | None) -> None:
        self.stats = stats

    def memory_stats(self) -> Mapping[str, int] | None:
        return self.stats


def planned(
    room: FreeMemory, step_bytes: int = 0, timed_bytes: int = 0, states: StatePlan = NO_STATES, **flags: object
) -> MemoryPlan:
    config = EngineConfig.from_options({"page_size": 4, "max_num_seqs": 4, "swap_space": 0.01} | flags)
    return plan_memory(LOADED.model.config, LOADED.params, config, room, step_bytes, timed_bytes, states=states)


def test_a_device_of_its_own_gives_all_that_is_not_kept_free() -> None:
    room = FreeMemory.on(Counted({"bytes_limit": 4 * GIB, "bytes_in_use": GIB}))
    assert room == FreeMemory(3 * GIB, shared=False)
    plan = planned(room, step_bytes=1000)
    assert plan.reserved_bytes == 2 * MOVED_BYTES + 1000
    assert plan.moved_tokens == MOVED_BYTES // TOKEN_BYTES
    left = room.free_bytes - plan.reserved_bytes - plan.kv_bytes
    assert 0 <= left < 4 * TOKEN_BYTES
    assert plan.kv_tokens % 4 == 0
    assert "kept free" in str(plan)
    assert planned(room, 1000, swap_space=0).reserved_bytes == 1 << 27, "the last array of the pool would take less"
    assert planned(room, GIB, swap_space=0).reserved_bytes == GIB


def test_memory_in_one_region_is_what_the_device_gave_and_not_what_jax_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has 3 of 8 GiB: JAX's region is smaller than its limit."""
    stats = {"bytes_limit": 7 * GIB, "bytes_in_use": GIB, "pool_bytes": 5 * GIB}
    monkeypatch.delenv(memory.PREALLOCATE, raising=False)
    assert FreeMemory.on(Counted(stats)).free_bytes == 4 * GIB
    assert FreeMemory.on(Counted(stats | {"pool_bytes": 0})).free_bytes == 6 * GIB, "nothing was allocated yet"
    monkeypatch.setenv(memory.PREALLOCATE, "false")
    assert FreeMemory.on(Counted(stats)).free_bytes == 6 * GIB, "further regions come as they are needed"


def test_memory_is_read_when_all_weights_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ y * 1e-3, x))
    busy = slow(jnp.ones((512, 512)))
    late = jax.tree.map(lambda leaf: (leaf + 0 * busy[0, 0]).astype(leaf.dtype), LOADED.params)
    draft = replace(LOADED, params=jax.tree.map(lambda leaf: leaf + 0 * busy[0, 0], LOADED.params))
    ready = list[bool]()

    def on(*_: object) -> FreeMemory:
        ready.extend(leaf.is_ready() for leaf in jax.tree.leaves((late, draft.params)))
        return FreeMemory(3 * GIB, shared=True)

    monkeypatch.setattr(FreeMemory, "on", on)
    config = EngineConfig.from_options({"page_size": 4, "max_num_seqs": 4, "swap_space": 0.01})
    sizing.plan_pools(LOADED.model, late, config, draft)
    assert ready
    assert all(ready)


class Regions:
    """How XLA's allocator places arrays on a GPU: each in the smallest free piece that holds it. A further region, if there is
    no such piece, is twice as large as the one before, and regions never merge; a preallocated one has the whole limit."""

    def __init__(self, limit: int, *, preallocated: bool) -> None:
        self.left, self.next_bytes, self.free = limit, limit if preallocated else 2 << 20, list[int]()

    def num_placed(self, *arrays: int) -> int:
        """How many arrays of so many bytes find a place, one after the other."""
        for number, num_bytes in enumerate(arrays):
            if not [piece for piece in self.free if piece >= num_bytes]:
                if num_bytes > self.left:
                    return number
                is_large = num_bytes > self.next_bytes
                while num_bytes > self.next_bytes:
                    self.next_bytes *= 2
                self.free.append(min(self.next_bytes, self.left))
                self.left -= self.free[-1]
                self.next_bytes *= 1 if is_large else 2
            self.free.remove(piece := min(piece for piece in self.free if piece >= num_bytes))
            if piece >= 2 * num_bytes or piece - num_bytes >= memory.UNSPLIT_BYTES:
                self.free.append(piece - num_bytes)
        return len(arrays)


@pytest.mark.parametrize(("num_windowed", "num_drafting"), [(0, 0), (16, 0), (0, 4)])
def test_a_plan_finds_its_place_in_one_region_and_not_in_regions_that_double(
    num_windowed: int, num_drafting: int
) -> None:
    """Llama-3-8B alone, as if it had windows, and with a draft model, in a model of an H200: JAX may take 0.9 of 139 GiB."""
    limit, layer_bytes, step_bytes = int(0.9 * 139 * GIB), 2 * 2 * 8 * 128, 700 << 20
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def loaded(num_layers: int) -> Loaded[Any]:
        config = replace(
            LOADED.model.config,
            vocab_size=128_256,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_size=14_336,
            max_position=131_072,
            num_layers=num_layers,
            tie_embeddings=False,
        )
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home),
            abstract_params(config, jnp.bfloat16, joined=True),
        )
        return Loaded(Model(config, joined=True), params, None)

    served, draft = loaded(32), loaded(num_drafting) if num_drafting else None
    weights = [local_bytes(leaf) for leaf in jax.tree.leaves((served.params, None if draft is None else draft.params))]
    windows = WindowPlan(num_windowed, 4096, 17, None, 0.125, 20_000) if num_windowed else NO_WINDOW_PLAN
    room, config = FreeMemory(limit - sum(weights), shared=False), EngineConfig.from_options({})
    plan = plan_memory(served.model.config, served.params, config, room, step_bytes, draft=draft, windows=windows)
    tokens = [plan.kv_tokens] * (32 - num_windowed + num_drafting)
    tokens += [plan.windows.num_slots * config.cache.page_size] * num_windowed
    pool = [(count + config.cache.page_size) * layer_bytes for count in tokens]
    steps = [step_bytes, *[memory.MOVED_BYTES // 32] * 32 * memory.STEPS_UNDER_WAY]
    assert sum(pool) > 0.98 * (room.free_bytes - sum(steps)), "nearly all of the memory is planned"

    arrays = [*weights, *pool, *steps]
    assert Regions(limit, preallocated=True).num_placed(*arrays) == len(arrays)
    assert Regions(limit, preallocated=False).num_placed(*arrays) < len(arrays)


def test_a_pool_that_finds_no_place_is_an_error_with_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "reset", lambda _: jnp.zeros(1 << 46).block_until_ready())
    with pytest.raises(
        ConfigError, match=r"no place for what was planned; got memory plan: weights .*fix: lower kv_tokens"
    ):
        tiny_llm(kv_tokens=64, max_num_seqs=1, max_num_batched_tokens=1)


def test_no_more_is_compiled_at_once_than_has_room_for_the_largest_product() -> None:
    config = LOADED.model.config
    rows, sampled = 8192, 16
    largest = largest_product_bytes(LOADED.params, rows, sampled)
    assert largest > 4 * rows * 2 * config.hidden_size
    assert largest == largest_product_bytes(LOADED.params, rows, 1)  # a layer's
    room = FreeMemory(3 * GIB, shared=False)
    plan = planned(room, timed_bytes=GIB)
    assert most_at_once(plan, room) == 3
    assert most_at_once(plan, FreeMemory(GIB // 2, shared=False)) == 1
    shared = planned(FreeMemory(3 * GIB, shared=True), timed_bytes=GIB)
    assert most_at_once(shared, room) is None
    assert "product" not in str(shared)


def test_quantised_pages_hold_more_tokens_in_the_same_bytes() -> None:
    room, head_dim = FreeMemory(3 * GIB, shared=False), LOADED.model.config.head_dim
    auto = planned(room)
    for name in ("int8", "fp8"):
        plan = planned(room, kv_cache_dtype=name)
        ratio = 4 * head_dim / (head_dim + 4)  # float32 against bytes and a scale
        for more in (plan.kv_tokens / auto.kv_tokens, plan.host_tokens / auto.host_tokens):
            assert more == pytest.approx(ratio, rel=0.01)
        assert plan.moved_tokens == pytest.approx(auto.moved_tokens * ratio, rel=0.01)
        assert plan.kv_bytes <= room.free_bytes - plan.reserved_bytes


def test_the_host_tier_holds_as_many_contexts_states_as_it_holds_contexts_pages() -> None:
    room, state_bytes = FreeMemory(3 * GIB, shared=False), 10 * TOKEN_BYTES + 1
    states = StatePlan(8, state_bytes)
    plan, least = planned(room, states=states), (state_bytes + 4 * TOKEN_BYTES) / GIB
    assert plan.states.num_states == 8
    assert plan.states.num_host_states == pytest.approx(plan.host_tokens / 80, rel=0.06)
    assert plan.host_bytes == plan.host_tokens * TOKEN_BYTES + plan.states.num_host_states * state_bytes
    assert 0.01 * GIB - 4 * TOKEN_BYTES < plan.host_bytes <= 0.01 * GIB
    assert f"{plan.host_tokens:,} tokens and {plan.states.num_host_states} states" in str(plan)
    for swap_space, tokens, copies in ((0, 0, 0), (0.99 * least, 0, 0), (1.01 * least, 4, 1)):
        small = planned(room, states=states, swap_space=swap_space)
        assert (small.host_tokens, small.states.num_host_states) == (tokens, copies)
        again = small.with_host(EngineConfig.from_options({"page_size": 4, "swap_space": 0.01}).cache)
        assert (again.host_tokens, again.host_bytes, again.states) == (plan.host_tokens, plan.host_bytes, plan.states)
    assert planned(room).states == NO_STATES


def test_a_shared_memory_gives_a_modest_part() -> None:
    assert FreeMemory.on(Counted(None)).shared
    free = 1000 * TOKEN_BYTES
    plan = planned(FreeMemory(free, shared=True), step_bytes=GIB)
    assert plan.reserved_bytes == 0
    assert 0.2 * free < plan.kv_bytes <= 0.25 * free + 4 * TOKEN_BYTES


def test_defaults_make_room_for_what_is_given() -> None:
    free, longest = 1000 * TOKEN_BYTES, LOADED.model.config.max_position
    roomy = FreeMemory(3 * longest * TOKEN_BYTES, shared=True)
    assert planned(roomy).max_model_len < longest - 1
    assert planned(roomy, max_model_len=longest - 1).max_model_len == longest - 1
    assert planned(FreeMemory(free, shared=True), page_size=64, max_num_seqs=8).kv_tokens == 8 * 64
    assert planned(roomy, chunked_prefill=False, max_num_batched_tokens=24).max_model_len == 24


def test_host_copies_shrink_to_what_a_container_has_and_are_refused_where_they_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory", lambda: Memory(3 * GIB, 2 * GIB))
    room = FreeMemory.on(Counted(None))
    assert room.free_bytes == 2 * GIB - memory.HOST_MARGIN
    plan, cache = planned(room, kv_tokens=GIB // TOKEN_BYTES), EngineConfig.from_options({}).cache
    left = 2 * GIB - memory.HOST_MARGIN - plan.kv_bytes
    fitted = memory.fit_host(plan, cache, is_given=False)
    assert fitted.swap_space * GIB == pytest.approx(left / 2, rel=0.01)
    assert plan.with_host(fitted).host_bytes == pytest.approx(left / 2, rel=0.01)
    with pytest.raises(
        ConfigError, match=r"no memory for swap_space; got 4\.0 GiB, 0\.75 GiB free beside .*fix: lower"
    ):
        memory.fit_host(plan, cache, is_given=True)
    with pytest.raises(
        ConfigError, match=r"swap_space is more than the machine has; got 4\.0 GiB; fix: less than 3\.00"
    ):
        plan.with_host(cache)
    monkeypatch.setenv(memory.PINNED_LIMIT, "6")
    own = planned(FreeMemory(8 * GIB, shared=False))
    assert memory.fit_host(own, cache, is_given=False).swap_space == 1.0, "half of 2 GiB: arrays may be half empty"
    pageable = planned(FreeMemory(8 * GIB, shared=False), pinned_memory=False)
    assert memory.fit_host(pageable, cache, is_given=False).swap_space == pytest.approx(1.75 / 2)
    monkeypatch.setattr(memory, "memory", lambda: Memory(64 * GIB, 50 * GIB))
    with pytest.raises(ConfigError, match=r"no pinned memory for swap_space; got 4\.0 GiB, room for 1\.0 GiB"):
        own.with_host(memory.fit_host(own, cache, is_given=True))
    assert memory.fit_host(plan, cache, is_given=False) == memory.fit_host(plan, cache, is_given=True) == cache


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the weights do not fit; got 3\.00 GiB, 2\.00 GiB free; fix: .*utilization"):
        check_weights(3 * GIB, FreeMemory(2 * GIB, shared=False))
    check_weights(GIB, FreeMemory(2 * GIB, shared=False))
    with pytest.raises(ConfigError, match="a page for every sequence; got 0 pages"):
        planned(FreeMemory(GIB // 2, shared=False))
    with pytest.raises(ConfigError, match="a page for every sequence; got 3 pages of 4 tokens, 4 sequences"):
        planned(FreeMemory(GIB, shared=True), kv_tokens=12)
    with pytest.raises(ConfigError, match="the KV pool does not fit"):
        planned(FreeMemory(2 * GIB, shared=False), kv_tokens=1 << 30)
    with pytest.raises(ConfigError, match="max_model_len is more than can be served"):
        planned(FreeMemory(GIB, shared=True), kv_tokens=64, max_model_len=100)
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization is (too small|too large)"):
            EngineConfig.from_options({"gpu_memory_utilization": share})


def test_what_a_step_takes_is_known_before_there_are_pages_and_grows_with_it() -> None:
    vocab, embed = LOADED.model.config.vocab_size, LOADED.model.config.hidden_size
    taken = [
        step_bytes(LOADED.model, LOADED.params, RunnerShape(10_000, 4, 8, 100, (1, bucket), 1), "reference")
        for bucket in (8, 32)
    ]
    assert taken[1] >= 4 * (8 * vocab + 32 * embed)
    assert taken[0] < taken[1] < 10_000 * 4 * TOKEN_BYTES


def test_jax_is_told_not_to_take_a_whole_gpu_and_the_start_says_what_it_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "jinfercept")
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "PJRT_GPU_ENABLE_ASYNC_DISPATCH"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    flags: dict[str, Any] = {"kv_tokens": 64, "max_num_seqs": 1, "max_num_batched_tokens": 1, "lazy": False}
    flags |= {"profile": PROFILES["paper-gptj-6b-a100"]}
    with tiny_llm(gpu_memory_utilization=0.8, **flags):
        pass
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    [changes] = [line for line in caplog.messages if "environment" in line]
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in changes
    assert "XLA_CLIENT_MEM_FRACTION=0.8" in changes
    assert os.environ["PJRT_GPU_ENABLE_ASYNC_DISPATCH"] == "1"
    caplog.clear()
    with tiny_llm(gpu_memory_utilization=0.7, **flags) as llm:
        times = llm.start_times
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    assert not [line for line in caplog.messages if "environment" in line], "nothing was set"
    assert times.num_cached == times.num_executables > 2
    shown = "\n".join(record.getMessage() for record in caplog.records if record.name == "jinfercept")
    assert "memory plan: weights" in shown
    assert f"{times.num_executables} executables in {times.compile_s:.1f} s, {times.num_cached} of them" in shown
    assert "profile given" in shown
    assert capsys.readouterr() == ("", "")


def test_a_pool_in_shared_memory_holds_the_longest_sequence_of_the_model_if_a_quarter_of_the_memory_does() -> None:
    config = replace(LOADED.model.config, max_position=131_072)

    def plan(free_bytes: int, **flags: object) -> MemoryPlan:
        options = EngineConfig.from_options({"page_size": 16, "max_num_seqs": 4, "swap_space": 0.01} | flags)
        return plan_memory(config, LOADED.params, options, FreeMemory(free_bytes, shared=True))

    whole = plan(5 * 131_072 * TOKEN_BYTES)
    assert (whole.kv_tokens, whole.max_model_len, whole.model_len) == (131_072, 131_072, 0)
    assert "need a larger KV pool" not in str(whole)
    short = plan(2 * 131_072 * TOKEN_BYTES)
    assert short.max_model_len == short.kv_tokens < 131_072
    assert "(the model's 131,072 need a larger KV pool: kv_tokens)" in str(short)
    assert "larger KV pool" not in str(plan(2 * 131_072 * TOKEN_BYTES, max_model_len=100))


def test_tables_that_do_not_fit_are_refused_with_pages_that_do():
    check_tables(256, 8000, 16)
    with pytest.raises(ConfigError, match="page_size=256"):
        check_tables(256, 131_072, 16)
    check_tables(256, 131_072, 256)


def test_pages_in_int8_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizing, "INTERLEAVED_ON", ("cpu",))
    with pytest.raises(ConfigError, match="quantised pages are in fp8; got int8; fix: kv_cache_dtype fp8, or auto"):
        tiny_llm(kv_cache_dtype="int8", attention="reference")


def test_attention_of_tpus_is_refused_elsewhere():
    with pytest.raises(ConfigError, match="attention=tpu needs a TPU; got JAX on a cpu; fix: attention=auto"):
        start_backend("tpu")


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "wanted"),
    [
        (1, 1, (1,)),
        (8, 32, (1, 8, 32)),
        (32, 512, (1, 8, 32, 128, 256, 512)),
        (64, 100, (1, 8, 32, 64, 100)),
        (256, 2048, (1, 8, 32, 64, 128, 256, 512, 2048)),
        (300, 9000, (1, 8, 32, 64, 128, 256, 384, 512, 2048, 8192, 9000)),
    ],
)
def test_steps_of_decodes_have_sizes_between_those_of_chunks(
    max_num_seqs: int, max_num_batched_tokens: int, wanted: tuple[int, ...]
) -> None:
    assert buckets(max_num_seqs, max_num_batched_tokens, "cpu") == wanted


def test_a_gpu_has_no_bucket_of_a_single_row() -> None:
    assert buckets(64, 512, "gpu") == (8, 32, 64, 128, 512)


@pytest.mark.parametrize(
    ("options", "on_gpu", "on_cpu"),
    [({}, 16, 1), ({"staging_pages": 4}, 4, 4), ({"staging_pages": 1}, 1, 1)],
)
def test_pages_of_a_context_cross_a_link_in_arrays_of_16(options: dict[str, Any], on_gpu: int, on_cpu: int) -> None:
    config = EngineConfig.from_options(options)
    assert (staging_pages(config, "gpu"), staging_pages(config, "cpu")) == (on_gpu, on_cpu)
