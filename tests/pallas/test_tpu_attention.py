"""Kernels of TPUs on a CPU: jax's own for attention and experts, interpreted, against references. No TPU runs here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

from jinfercept.models.attention import available
from jinfercept.pallas.layouts.interleaved import FP8, apart, interleaved_shape, with_padded_heads
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.reference import paged_attention_reference
from jinfercept.pallas.tiles import Heads
from jinfercept.pallas.tpu_kernels import (
    CONTEXT_TOKENS,
    QUERIES,
    blocks_for,
    is_supported,
    operands_of,
    options_of,
    paged_attention_tpu,
    product,
    tile_of,
    tpu_grouped_product,
)
from tests.support.attention_steps import Shapes, make_step


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels for TPUs are interpreted on a CPU; skips a test where jax has its interpreter elsewhere."""
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(interpreter, "get", _read(interpreter.get))
        patch.setattr(interpreter, "swap", _swap(interpreter.swap, interpreter.get))
        yield


def _read(own: Any) -> Any:
    """A read of a reference, seen with another shape or type: what lies before that is read first."""

    @wraps(own)
    def read(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, views: Any, *rest: Any, **options: Any
    ) -> Any:
        views = jax.tree.map(int, views)
        first = next((place for place, view in enumerate(views) if not hasattr(view, "indices")), len(views))
        token, values = own(token, device, core, space, buffer, views[:first], *rest, **options)
        for view in views[first:]:
            values = _seen(values, view)
        return token, values

    return read


def _swap(own: Any, read: Any) -> Any:
    """A masked store as a read and a whole store."""

    @wraps(own)
    def swap(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, views: Any, value: Any, mask: Any, **rest: Any
    ) -> Any:
        if mask is not None:
            token, before = read(token, device, core, space, buffer, views)
            value = np.where(np.asarray(mask), np.asarray(value), before)
        return own(token, device, core, space, buffer, views, value, None, **rest)

    return swap


def _seen(values: np.ndarray, view: Any) -> np.ndarray:
    """Values as a reference's view has them: some of them, in another shape, or neighbours of an axis as one word."""
    if hasattr(view, "indices"):
        return values[tuple(map(_index, view.indices))]
    if hasattr(view, "shape"):
        return values.reshape(view.shape)
    return _words(values, jnp.dtype(view.dtype))


def _index(index: Any) -> int | slice:
    return (
        index if isinstance(index, int) else slice(index.start, index.start + index.size * index.stride, index.stride)
    )


def _words(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Rows of narrow numbers as rows of words, the first of them in the lowest bits, as they lie in a TPU's registers."""
    packed = dtype.itemsize // values.dtype.itemsize
    *before, rows, columns = values.shape
    pairs = np.swapaxes(values.reshape(*before, rows // packed, packed, columns), -1, -2)
    return np.ascontiguousarray(pairs).view(dtype)[..., 0]


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


def test_rows_are_multiplied_with_the_matrix_of_their_expert():
    rows = jax.random.normal(jax.random.key(0), (20, 128), jnp.bfloat16)
    stack = jax.random.normal(jax.random.key(1), (4, 128, 256), jnp.bfloat16)
    sizes = jnp.array([3, 0, 10, 4])
    got = product(rows, stack, sizes, interpret=True)
    want = jnp.concatenate([rows[:3] @ stack[0], rows[3:13] @ stack[2], rows[13:17] @ stack[3]])
    assert got.shape == (20, 256)
    np.testing.assert_allclose(got[:17].astype(np.float32), want.astype(np.float32), atol=0.1, rtol=2**-6)


def test_tiles_are_no_larger_than_what_is_multiplied():
    assert tile_of(8, 128, 256) == (16, 128, 256)
    assert tile_of(4096, 4096, 1536) == (128, 2048, 512)


def test_a_cpu_has_its_own_product():
    assert tpu_grouped_product(jnp.ones(2, jnp.int32), jnp.bfloat16, [(2, 128, 128)]) is None
