"""An engine works under its own settings of JAX: the same tokens, and nothing compiled, whatever its caller has set."""

import enum
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jinfercept import LLM, SamplingParams
from jinfercept.config import EngineConfig
from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.joined_weights import separate
from jinfercept.models.protocol import Params
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.start.backend import CompileCounter, prepare_backend
from jinfercept.start.memory import GIB
from tests.support.tiny_model import GOLDEN

SIZES: Any = {"kv_tokens": 128, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 4, "max_model_len": 64}
OPTIONS: Any = {"dtype": "float32", "profile": PROFILES["paper-gptj-6b-a100"], "lazy": True, **SIZES}
PROMPT = {"prompt_token_ids": list(range(20))}
SEEDED = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.01, seed=7, max_tokens=8, ignore_eos=True)

HOSTILE: dict[str, Any] = {
    "jax_enable_x64": True,
    "jax_transfer_guard": "disallow_explicit",
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_disable_jit": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_legacy_prng_key": "error",
    "jax_debug_nans": True,
    "jax_debug_key_reuse": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_no_tracing": True,
    "jax_no_execution": True,
}

REFUSED = ("jax_error_checking_behavior_nan", "jax_high_dynamic_range_gumbel", "jax_random_seed_offset", "jax_scan3")


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SEEDED)[0].outputs[0].token_ids


@contextmanager
def set_globally(settings: dict[str, Any]) -> Iterator[None]:
    """These settings of JAX for all threads."""
    before = {name: jax.config.values[name] for name in settings}
    if "jax_transfer_guard" in before:  # sets those of the three directions, too
        before |= {
            f"jax_transfer_guard_{way}": None for way in ("host_to_device", "device_to_device", "device_to_host")
        }
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[LLM, list[int], Params]]:
    """An LLM that started under JAX's defaults and has compiled what the tests need, its tokens and its weights."""
    with LLM(GOLDEN / "llama_gqa", **OPTIONS) as llm:
        weights = jax.tree.map(jnp.copy, separate(llm.params))
        expected = tokens(llm)
        llm.update_weights(weights)
        assert tokens(llm) == expected
        yield llm, expected, weights


def check(llm: LLM, expected: list[int], weights: Params) -> int:
    """Assert that everything an LLM is asked to do works; returns how many functions were compiled."""
    with closing(CompileCounter()) as compilations:
        assert tokens(llm) == expected
        llm.update_weights(weights)
        assert tokens(llm) == expected
        llm.restart()
        assert tokens(llm) == expected
    return compilations.count


def test_settings_that_come_after_the_start_change_nothing(started: tuple[LLM, list[int], Params]) -> None:
    llm, expected, weights = started
    numpys = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    for name, value in HOSTILE.items():
        with set_globally({name: value}):
            assert check(llm, expected, numpys) == 0, name
    mesh = jax.make_mesh((1,), ("data",))
    with jax.set_mesh(mesh), jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        assert check(llm, expected, numpys) == 0


def test_a_start_under_hostile_settings_gives_the_same_tokens(started: tuple[LLM, list[int], Params]) -> None:
    _, expected, _ = started
    with set_globally(HOSTILE), jax.set_mesh(jax.make_mesh((1,), ("data",))):
        with LLM(GOLDEN / "llama_gqa", **OPTIONS) as llm:
            assert tokens(llm) == expected
        assert jax.config.jax_enable_x64
        assert not jax.sharding.get_mesh().empty


def test_a_training_loop_generates_trains_with_donation_and_hands_over_its_weights(
    started: tuple[LLM, list[int], Params],
) -> None:
    llm, expected, weights = started
    mesh = jax.make_mesh((1,), ("data",))

    def train(params: Params, change: Any) -> Params:
        return jax.tree.map(lambda leaf: leaf + change.astype(leaf.dtype), params)

    step = jax.jit(train, donate_argnums=0)
    with jax.enable_x64(True), jax.set_mesh(mesh), jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        place = NamedSharding(mesh, PartitionSpec())
        params = jax.device_put(jax.tree.map(np.array, weights), place)
        up, down = jax.device_put((np.float64(0.5), np.float64(-0.5)), place)
        llm.update_weights(params)
        seen = [tokens(llm)]
        for change in (up, down):
            params = step(params, change)
            assert tokens(llm) == seen[-1]  # of the weights that it was given, which training has donated
            llm.update_weights(params)
            seen.append(tokens(llm))
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        llm.update_weights(wide)
    assert seen[0] == expected
    assert seen[1] != expected
    assert tokens(llm) == seen[2]
    llm.update_weights(weights)


def test_weights_that_were_donated_are_refused_and_the_old_ones_stay(started: tuple[LLM, list[int], Params]) -> None:
    llm, expected, weights = started
    gone = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), weights)
    gone.layers[1]["down"].delete()
    with pytest.raises(ModelError, match=r"layers\.1\.down was deleted; got an array that was deleted or donated"):
        llm.update_weights(gone)
    with pytest.raises(ModelError, match="was deleted"):
        LLM(llm.model, params=gone, **OPTIONS)
    assert tokens(llm) == expected


def test_what_cannot_be_set_for_one_thread_is_refused_by_name(started: tuple[LLM, list[int], Params]) -> None:
    llm, expected, _ = started
    for name, value in (("jax_random_seed_offset", 3), ("jax_high_dynamic_range_gumbel", True)):
        with set_globally({name: value}), pytest.raises(ConfigError, match=f"{name}; got {value}"):
            LLM(GOLDEN / "llama_gqa", **OPTIONS)
    with set_globally({"jax_default_device": "gpu"}), pytest.raises(ConfigError, match="backend does not start"):
        LLM(GOLDEN / "llama_gqa", **OPTIONS)
    with pytest.raises(ConfigError, match="in a function that JAX traces"):
        jax.jit(lambda x: llm.restart() or x)(1.0)
    assert tokens(llm) == expected


def other_values(name: str) -> list[Any]:
    """What a setting can be instead, where its values can be counted."""
    if name == "jax_num_cpu_devices" or "topology_timeout" in name:  # of a backend that has not started
        return []
    value, (kind, _, options) = jax.config.values[name], jax.config.meta[name]
    if isinstance(value, enum.Enum):
        return [other for other in type(value) if other is not value]
    if kind is bool:
        return [not value]
    if kind is int:
        return [1, 3]
    return [other for other in options.get("enum_values", ()) if other != value] if kind == "enum" else []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_setting_of_jax_gives_the_same_tokens_or_is_refused_by_name(
    started: tuple[LLM, list[int], Params],
) -> None:
    llm, expected, weights = started
    num_tried = 0
    for name in sorted(jax.config.values):
        for value in other_values(name):
            with set_globally({name: value}):
                check(llm, expected, weights)
                if name in REFUSED:
                    with pytest.raises(ConfigError, match=name):
                        LLM(GOLDEN / "llama_gqa", **OPTIONS)
                else:
                    with LLM(GOLDEN / "llama_gqa", **OPTIONS) as other:
                        assert tokens(other) == expected, (name, value)
            num_tried += 1
    assert num_tried > 150


LIMIT, PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"


def pinned(
    set_by_user: dict[str, str] | None = None, *, given: bool = False, **options: Any
) -> tuple[str | None, str | None]:
    """The limit of pinned memory and whether it is pinned at once, after a start with these options."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("XLA_", "PJRT_")):
                patch.delenv(name)
        for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", LIMIT, PREALLOCATE):
            patch.setenv(name, "")  # removed afterwards
            patch.delenv(name)
        for name, value in (set_by_user or {}).items():
            patch.setenv(name, value)
        prepare_backend(
            EngineConfig.from_options({"compilation_cache": False, "dtype": "float32", **options}), swap_is_given=given
        )
        return os.environ.get(LIMIT), os.environ.get(PREALLOCATE)


def test_the_memory_for_host_copies_is_pinned_at_once_where_the_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=64 * GIB))
    assert pinned(swap_space=4) == ("12", "true"), "arrays of several pages may be half empty"
    assert pinned(swap_space=4, staging_pages=1) == ("8", "true")
    assert pinned(swap_space=14) == ("32", "true")
    assert pinned(swap_space=15) == ("32", "true"), "half of what is left; the memory plan promises what that holds"
    assert pinned(swap_space=29, given=True) == ("62", "true")
    assert pinned(swap_space=30, given=True) == ("32", "true"), "the memory plan refuses it"
    assert pinned(swap_space=0)[1] is None
    assert pinned(swap_space=4, pinned_memory=False)[1] is None


def test_what_the_user_has_set_of_pinned_memory_stays() -> None:
    assert pinned({LIMIT: "100"}) == ("100", None)
    assert pinned({PREALLOCATE: "false"})[1] == "false"
    assert pinned({LIMIT: "8", PREALLOCATE: "true"}) == ("8", "true")


@pytest.mark.parametrize(("cores", "devices", "threads"), [(2, 4, "8"), (2, 2, "4"), (8, 4, None), (2, 1, None)])
def test_devices_that_wait_for_each_other_have_threads(
    cores: int, devices: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("NPROC", "")  # removed afterwards
    monkeypatch.delenv("NPROC")
    pinned(tensor_parallel_size=devices)
    assert os.environ.get("NPROC") == threads
