"""Attention of TPUs on a CPU: jax's kernel, interpreted, and its own reference for it, against ours. No TPU runs here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

from jinfercept.layouts.interleaved import FP8, apart, interleaved_shape, with_padded_heads
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.attention import available
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tpu_attention import (
    CONTEXT_TOKENS,
    QUERIES,
    blocks_for,
    is_supported,
    operands_of,
    options_of,
    paged_attention_tpu,
)
from tests.support.attention_steps import Shapes, make_step
from tests.support.tpu_interpreter import interpreted

ROWS = [(1, 33), (1, 1), (30, 100), (4, 4)]
FAMILIES = {
    "smollm": (Shapes(40, 6, 8, 16, 9, 3, 64), PLAIN),
    "gemma 3": (Shapes(40, 6, 8, 16, 4, 1, 256), Scoring(window=23)),
    "gemma 2": (Shapes(40, 6, 8, 16, 8, 4, 128), Scoring(window=50, soft_cap=0.7)),
    "llama": (Shapes(40, 6, 8, 16, 8, 2, 128), PLAIN),
    "gpt-j": (Shapes(40, 6, 8, 16, 4, 4, 256), PLAIN),
    "phi": (Shapes(40, 6, 8, 16, 4, 4, 96), PLAIN),
    "qwen": (Shapes(40, 6, 8, 16, 14, 2, 64), PLAIN),
    "qwen 3 with experts, llama 70b of eight devices": (Shapes(40, 6, 8, 16, 8, 1, 128), PLAIN),
    "gemma": (Shapes(40, 6, 8, 16, 8, 1, 256), PLAIN),
    "mistral": (Shapes(40, 6, 8, 16, 8, 2, 128), Scoring(window=23)),
    "olmo": (Shapes(40, 6, 8, 16, 5, 5, 128), PLAIN),
    "granite": (Shapes(40, 6, 8, 16, 32, 8, 64), PLAIN),
    "phi 4": (Shapes(40, 6, 8, 16, 40, 10, 128), PLAIN),
}
CASES = [
    pytest.param(*case, id=name, marks=() if number < 3 else pytest.mark.slow)
    for number, (name, case) in enumerate(FAMILIES.items())
]
reference = jax.jit(paged_attention_reference, static_argnames="scoring")


def interleaved(pages, num_kv_heads: int, head_dim: int):
    """Pages in the layout of TPUs, those of unwritten slots NaN as before."""
    num_pages, page_size = pages.shape[:2]
    shape = interleaved_shape(num_pages, page_size, num_kv_heads, head_dim, pages.dtype)
    missing = shape[2] // 2 - num_kv_heads, shape[3] - head_dim
    padded = jnp.pad(pages, ((0, 0),) * 3 + ((0, missing[0]), (0, missing[1])))
    return jnp.moveaxis(padded, 2, 3).reshape(shape)


def padded_step(shapes: Shapes, dtype):
    """A step's queries, its pages in the layout of TPUs, its batch, and its pages as they were."""
    q, pages, batch = make_step(shapes, 2, ROWS, 3, dtype=dtype)
    own = interleaved(pages, shapes.num_kv_heads, shapes.head_dim)
    return with_padded_heads(q, shapes.num_kv_heads, own), own, batch, q, pages


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shapes", "scoring"), CASES)
def test_what_the_kernel_is_given_has_the_result_of_the_reference(shapes, scoring, dtype):
    padded, own, batch, q, pages = padded_step(shapes, dtype)
    own = jnp.where(jnp.isnan(own), 0, own)  # the kernel masks what was not written; its reference does not
    used = sum(length for length, _ in ROWS)
    rows: list[Any] = [np.asarray(numbers) for numbers in operands_of(padded, own, batch)[2:]]

    @jax.jit
    def jaxs_own(q, pages):  # whose rows are known while it is traced
        return ref_ragged_paged_attention(operands_of(q, pages, batch).q, pages, *rows, **options_of(q, pages, scoring))

    with jax.default_matmul_precision("highest"):
        got = jaxs_own(padded, own)[:used, : shapes.num_heads, : shapes.head_dim]
    want = reference(q, pages, batch, scoring=scoring)[:used]
    tolerance = 2e-5 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("gemma 2", "bfloat16") else pytest.mark.slow)
        for name in FAMILIES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_kernel_itself_has_the_result_of_the_reference(name: str, dtype: str):
    shapes, scoring = FAMILIES[name]
    padded, own, batch, q, pages = padded_step(shapes, jnp.dtype(dtype))
    assert np.isnan(np.asarray(own, np.float32)).any()
    with interpreted():
        got = jax.jit(lambda q, pages: paged_attention_tpu(q, pages, batch, scoring))(padded, own)
    got = np.asarray(got[:, : shapes.num_heads, : shapes.head_dim], np.float32)
    want = np.asarray(reference(q, pages, batch, scoring=scoring), np.float32)
    tolerance = 1e-5 if dtype == "float32" else 2**-6
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("shapes", "scoring"), CASES)
def test_the_reference_reads_both_layouts_alike(shapes, scoring):
    padded, own, batch, q, pages = padded_step(shapes, jnp.float32)
    got = reference(padded, own, batch, scoring=scoring)
    np.testing.assert_allclose(got[:, : shapes.num_heads], reference(q, pages, batch, scoring=scoring), atol=1e-6)
    np.testing.assert_array_equal(apart(own)[..., : shapes.num_kv_heads, : shapes.head_dim], pages)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma 2", marks=pytest.mark.slow)])
def test_pages_in_fp8_have_the_result_of_the_reference_over_their_numbers(name: str):
    shapes, scoring = FAMILIES[name]
    padded, own, batch, _, pages = padded_step(shapes, jnp.bfloat16)
    with interpreted():
        got = jax.jit(lambda q, pages: paged_attention_tpu(q, pages, batch, scoring))(padded, own.astype(FP8))
    got = np.asarray(got[:, : shapes.num_heads, : shapes.head_dim], np.float32)
    rounded = pages.astype(FP8).astype(jnp.bfloat16)
    want = np.asarray(reference(padded[:, : shapes.num_heads, : shapes.head_dim], rounded, batch, scoring=scoring))
    np.testing.assert_allclose(got, want.astype(np.float32), atol=2**-6, rtol=2**-6)


@pytest.mark.slow
def test_the_kernel_itself_attends_to_steps_of_decode_rows_only():
    shapes = Shapes(6, 6, 8, 16, 8, 2, 128)
    q, pages, batch = make_step(shapes, 5, [(1, 33), (1, 1), (1, 128), (1, 16), (1, 17)], 3, dtype=jnp.bfloat16)
    with interpreted():
        got = jax.jit(lambda q, pages: paged_attention_tpu(q, pages, batch))(q, interleaved(pages, 2, 128))
    want = reference(q, pages, batch)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=2**-6, rtol=2**-6)


def test_it_is_chosen_on_tpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    heads = Heads(32, 8, 128, 2)
    assert available("bfloat16", "bfloat16", heads, 16) == ["tpu"]
    assert available("bfloat16", "int32", heads, 16) == [], "quantised pages"


def test_layers_with_sinks_have_the_reference():
    padded, own, batch, *_ = padded_step(FAMILIES["llama"][0], jnp.float32)
    scoring = Scoring(sinks=jnp.linspace(-1, 3, 8))
    np.testing.assert_array_equal(
        paged_attention_tpu(padded, own, batch, scoring), paged_attention_reference(padded, own, batch, scoring)
    )


def test_the_kernel_takes_queries_and_pages_of_one_type():
    assert is_supported("bfloat16", "bfloat16")
    assert is_supported("bfloat16", "float8_e4m3fn")
    assert not is_supported("bfloat16", "int32")
    assert not is_supported("float16", "float16")
    padded, own, batch, *_ = padded_step(FAMILIES["llama"][0], jnp.float32)
    with pytest.raises(ValueError, match="got float32 and bfloat16; fix: use attention reference"):
        paged_attention_tpu(padded, own.astype(jnp.bfloat16), batch)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (64, 64, 128), (16, 16, 256), (8, 1, 256)])
@pytest.mark.parametrize("page_size", [16, 256])
def test_blocks_fit_into_the_memory_that_a_kernel_may_take(heads, kv_heads, head_dim, page_size):
    pages = jax.ShapeDtypeStruct(interleaved_shape(9, page_size, kv_heads, head_dim, jnp.bfloat16), jnp.bfloat16)
    blocks = blocks_for(jax.ShapeDtypeStruct((2048, heads, head_dim), jnp.bfloat16), pages, pages_per_row=512)
    assert 1 <= blocks.pages <= CONTEXT_TOKENS // page_size
    assert 8 <= blocks.queries <= QUERIES
    one_token = jax.ShapeDtypeStruct((1, heads, head_dim), jnp.bfloat16)
    assert blocks_for(one_token, pages, pages_per_row=3).queries == 1


def test_several_wide_kv_heads_on_a_device_have_the_reference_with_a_line_in_the_log(caplog):
    padded, own, batch, *_ = padded_step(Shapes(40, 6, 8, 16, 4, 4, 256), jnp.float32)
    np.testing.assert_array_equal(
        paged_attention_tpu(padded, own, batch), paged_attention_reference(padded, own, batch)
    )
    assert "4 KV heads of 256 on a device" in caplog.text
