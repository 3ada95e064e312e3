"""Every tiny checkpoint gives the logits that transformers gives; the product that applies weights, whatever its rows."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jinfercept.cpu_kernels import native
from jinfercept.models.adapted import AdaptedTensor
from jinfercept.models.blocks import project
from jinfercept.models.load import load
from tests.support.dense_model import dense_attend, logits

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = (
    "llama_gqa",
    "llama_mha",
    "llama_tied",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "olmo3",
    "phi3",
    "granite",
    "smollm3",
    "mistral_windowed",
    "ministral3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gemma4_e4b",
    "gemma4_e2b",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "glm4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "nemotron_h",
    "nemotron_h_latent",
    "gptj",
    "gptj_published",
)


@pytest.mark.parametrize("name", TINY)
def test_float32_logits_are_those_of_transformers(name):
    loaded, golden = load(GOLDEN / name, dtype="float32"), np.load(GOLDEN / f"{name}.npz")
    for i in (0, 1):
        ours = logits(loaded.model, loaded.params, golden[f"tokens_{i}"])
        expected = golden[f"logits_{i}"]
        np.testing.assert_allclose(ours, expected, atol=max(1e-4, 5e-6 * np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("name", ["llama_gqa", "gptj"])
def test_bfloat16_logits_are_near_those_of_transformers(name):
    loaded, golden = load(GOLDEN / name, dtype="bfloat16"), np.load(GOLDEN / f"{name}.npz")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    ours = logits(loaded.model, loaded.params, golden["tokens_1"])
    assert ours.dtype == jnp.float32
    assert np.sqrt(np.mean((ours - golden["logits_1"]) ** 2)) < 0.05  # torch's own bfloat16 is 0.031 off for llama_gqa


def test_one_compiled_layer_serves_all_layers():
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    traces = []

    @jax.jit
    def layer(params, x):
        traces.append(x.shape)
        return loaded.model.layer(params, x, jnp.arange(4), None, dense_attend)[0]

    x = loaded.model.embed(loaded.params.embed, jnp.arange(4), jnp.arange(4))
    for params in loaded.params.layers:
        x = layer(params, x)
    assert len(traces) == 1


def values(*shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_give_what_they_give_among_many(rows: int) -> None:
    x, weight = values(8, 64), nnx.Param(values(64, 2, 16))
    product = jax.jit(lambda x: project("te,ehd->thd", x, weight))
    np.testing.assert_array_equal(product(x[:rows]), product(x)[:rows])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_single_row_is_given_more_on_every_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda: False)
    traced = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).trace(values(1, 64), values(64, 32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.pad" in text
    assert "HIGHEST" not in text


def test_float32_rows_stay_as_they_are() -> None:
    x, weight = values(1, 64, dtype="float32"), values(64, 32, dtype="float32")
    text = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).lower(x, weight).as_text()
    assert "stablehlo.pad" not in text
    assert "HIGHEST" in text


def adapted(rows: np.ndarray) -> AdaptedTensor:
    """A weight with two adapters of rank 4, some of which the rows have."""
    base, a, b = (values(*shape, dtype="float32") for shape in ((64, 32), (64, 1, 8), (8, 32)))
    return AdaptedTensor(base, a, (b,), jnp.asarray(rows))


def test_rows_get_what_their_adapters_add_and_steps_without_any_get_the_base() -> None:
    x, product = values(3, 64, dtype="float32"), jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight)))
    rows = np.array([[False, False], [True, False], [False, True]])
    weight = adapted(rows)
    base, inner = x @ weight.base, (x @ weight.a[:, 0]).reshape(3, 2, 4)
    change = jnp.where(rows[..., None], inner, 0).reshape(3, 8) @ weight.b[0]
    np.testing.assert_allclose(product(x, weight), base + change, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product(x, adapted(np.zeros_like(rows))), product(x, weight.base))


@pytest.mark.parametrize(("platform", "branches"), [("cpu", True), ("cuda", False)])
def test_only_a_cpu_branches_on_whether_a_row_has_an_adapter(platform: str, branches: bool) -> None:
    weight = adapted(np.zeros((1, 2), bool))
    traced = jax.jit(lambda x, weight: project("te,ef->tf", x, nnx.Param(weight))).trace(
        values(1, 64, dtype="float32"), weight
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()  # the platform is a case of its own, and constant
    assert ("stablehlo.or" in text) is branches
