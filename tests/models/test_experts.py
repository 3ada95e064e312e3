"""Experts: blocks of rows, grouped products and gates apart from their ups give the sum over each token's experts."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.suite.models import SMALL_LLAMA
from jinfercept.cpu_kernels import native
from jinfercept.errors import ModelError
from jinfercept.models import joined_weights, model
from jinfercept.models.config import ExpertsConfig, ModelConfig
from jinfercept.models.experts import ExpertWeights, _by_blocks, _grouped, _has_cpu_kernel, _Pairs, choose, combined
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.in_memory import Replacement, initial_params, shapes_of
from jinfercept.models.joined_weights import is_joined, separate_layer, serve_layer
from jinfercept.models.load import load, random_params
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model, abstract_params, param_bytes
from jinfercept.models.protocol import Params
from jinfercept.models.sharding import partition_specs
from jinfercept.pallas.layouts.packed_weights import ExpertSides

GOLDEN = Path(__file__).parent.parent / "golden"
EXPERTS = ExpertsConfig(num_experts=5, per_token=2, ffn_size=12, normalised=True)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


GATE_UP, DOWN, ROUTER = drawn(5, 8, 2, 12), drawn(5, 12, 8), drawn(8, 5)


def by_token(x: np.ndarray) -> np.ndarray:
    """One token and one expert after the other."""
    rows = []
    for row in np.asarray(x):
        probabilities = np.asarray(jax.nn.softmax(row @ ROUTER))
        chosen = np.argsort(-probabilities)[:2]
        total = np.zeros(8)
        for expert in chosen:
            gate, up = row @ GATE_UP[expert, :, 0], row @ GATE_UP[expert, :, 1]
            total += (
                probabilities[expert]
                / probabilities[chosen].sum()
                * np.asarray((jax.nn.silu(gate) * up) @ DOWN[expert])
            )
        rows.append(total)
    return np.array(rows)


@jax.jit
def computed(x: jax.Array) -> jax.Array:
    return combined(x, choose(jnp.dot(x, ROUTER, precision="highest"), EXPERTS), ExpertWeights(GATE_UP, DOWN), EXPERTS)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_token_has_the_weighted_sum_of_its_experts(num_rows: int) -> None:
    x = drawn(num_rows, 8)
    np.testing.assert_allclose(computed(x), by_token(np.asarray(x)), atol=1e-4, rtol=0)


def test_rows_of_padding_change_no_other_row() -> None:
    x = drawn(16, 8)
    rubbish = x.at[5:].set(jnp.nan)
    np.testing.assert_array_equal(computed(rubbish)[:5], computed(x)[:5])


@pytest.mark.parametrize(("block_rows", "swiglu"), [(1, None), (2, (1.0, 1.7)), (8, None)])
def test_blocks_of_rows_and_grouped_products_are_the_same(block_rows: int, swiglu: tuple[float, float] | None) -> None:
    sizes = jnp.array([0, 7, 1, 0, 5], jnp.int32)
    pairs = _Pairs(jnp.arange(13), jnp.repeat(jnp.arange(5), sizes), sizes)
    arguments = (drawn(13, 8), pairs, ExpertWeights(GATE_UP, DOWN, drawn(5, 2, 12), drawn(5, 8)))
    experts = replace(SIX, swiglu=swiglu)
    blocks = jax.jit(partial(_by_blocks, experts, block_rows))(*arguments)
    np.testing.assert_allclose(blocks, _grouped(experts, None, *arguments), atol=1e-4, rtol=0)


@pytest.mark.skipif(not native.usable(), reason="kernels need llvmlite and an x86 CPU with AVX2")
@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_cpus_kernel_and_blocks_of_rows_are_the_same(num_rows: int, with_biases: bool) -> None:
    config = ExpertsConfig(num_experts=5, per_token=2, ffn_size=64, normalised=True)
    biases = (drawn(5, 2, 64), drawn(5, 128)) if with_biases else ()
    weights = ExpertWeights(drawn(5, 128, 2, 64) / 8, drawn(5, 64, 128) / 8, *biases)
    x, logits = drawn(num_rows, 128), drawn(num_rows, 5)
    assert _has_cpu_kernel(x, weights)

    def compute(x: jax.Array, logits: jax.Array) -> jax.Array:
        return combined(x, choose(logits, config), weights, config)

    by_kernel = jax.jit(compute)(x, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "features", frozenset)
        by_blocks = jax.jit(lambda *arguments: compute(*arguments))(x, logits)
    np.testing.assert_allclose(by_kernel, by_blocks, atol=1e-4, rtol=0)


def test_experts_apart_and_stacked_are_read_alike(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(GOLDEN / "qwen3_moe", tmp_path / "apart")
    tensors = load_file(tmp_path / "apart" / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        layer, stacked = name.split(".experts.")[0], tensors.pop(name)
        for i, matrix in enumerate(stacked):
            sides = ("gate", "up") if "gate_up" in name else ("down",)
            for side, part in zip(sides, np.split(matrix, len(sides)), strict=True):
                tensors[f"{layer}.experts.{i}.{side}_proj.weight"] = np.ascontiguousarray(part)
    save_file(tensors, tmp_path / "apart" / "model.safetensors")
    apart, stacked = (load(folder, dtype="float32").params for folder in (tmp_path / "apart", GOLDEN / "qwen3_moe"))
    jax.tree.map(np.testing.assert_array_equal, apart, stacked)


def test_the_memory_of_weights_counts_all_experts() -> None:
    config = config_from_hf(json.loads((GOLDEN / "mixtral" / "config.json").read_text()))
    dense = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32) + 2 * 128 * 32 + 32
    assert param_bytes(config, "float32") == 4 * (dense + 2 * (32 * 6 + 6 * 3 * 32 * 16))


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, [False, False]),
        ({"mlp_only_layers": [0]}, [True, False]),
        ({"decoder_sparse_step": 2}, [True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [True, True]),
    ],
)
def test_layers_without_experts_are_a_kind(change: dict, dense: list[bool]) -> None:
    config = config_from_hf(json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | change)
    assert [config.kind(index).is_dense for index in range(2)] == dense
    assert bool(config.kinds) == any(dense)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("gpt_oss", {"swiglu_limit": "seven"}, "swiglu_limit"),
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts": 4}, "says a size twice"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("glm4_moe", {"n_group": 2}, "n_group"),
        ("glm4_moe", {"first_k_dense_replace": "one"}, "first_k_dense_replace"),
        ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        ("mixtral", {"num_local_experts": "six"}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("llama_gqa", {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_experts_that_would_be_computed_wrongly_are_refused(name: str, change: dict, words: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    with pytest.raises(ModelError, match=words):
        config_from_hf(config | change)


SIX = ExpertsConfig(num_experts=6, per_token=2, ffn_size=20, normalised=True)


@pytest.fixture
def on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if JAX's default backend was a TPU, as far as weights are concerned."""
    for module in (model, joined_weights):
        for name in ("joins", "parts_experts"):
            monkeypatch.setattr(module, name, lambda: True)


def config(columns: int) -> ModelConfig:
    """A model of sizes of its own: what is compiled as if for a TPU is used by no other test."""
    return replace(SMALL_LLAMA, hidden_size=72, experts=SIX, ffn_size=columns)


@pytest.mark.parametrize("swiglu", [None, (7.0, 1.7)])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_with_sides_apart_give_the_same_rows(swiglu: tuple[float, float] | None, biased: bool):
    experts = replace(SIX, swiglu=swiglu)
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    x, gate_up, down, router = drawn(9, 8), drawn(6, 8, 2, 20), drawn(6, 20, 8), drawn(8, 6)
    biases = (drawn(6, 2, 20), drawn(6, 8)) if biased else (None, None)

    @jax.jit
    def fed(stack):
        choices = choose(jnp.dot(x, router, precision="highest"), experts)
        return combined(x, choices, ExpertWeights(stack, down, *biases), experts)

    np.testing.assert_allclose(fed(ExpertSides.of(gate_up)), fed(gate_up), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_tpus")
def test_weights_are_served_apart_and_come_back_as_they_were():
    own = config(40)
    params = random_params(own, "float32", 0)
    layer = params.layers[0]
    assert isinstance(layer["experts_gate_up"], ExpertSides)
    assert is_joined(layer)
    assert serve_layer(layer) is layer
    shapes = abstract_params(own, "float32")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [leaf.shape for leaf in jax.tree.leaves(params)]
    assert param_bytes(own, "float32") == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, serve_layer(separate_layer(layer)), layer)
    specs = partition_specs(params).layers[0]
    assert tuple(specs["experts_gate_up"]) == specs["experts_down"][:1]


@pytest.mark.usefixtures("on_tpus")
def test_other_weights_of_a_checkpoints_shapes_replace_them():
    own = Model(config(48))
    first, second = (random_params(own.config, "float32", seed) for seed in (0, 1))
    expected = jax.tree.map(np.asarray, second)
    apart = Params(second.embed, tuple(map(separate_layer, second.layers)), second.head)
    served = initial_params(own, first, ModelMesh.default())
    written = Replacement(own, apart, shapes_of(served)).write([served.embed, *served.layers, served.head])
    jax.tree.map(np.testing.assert_array_equal, written, expected)
