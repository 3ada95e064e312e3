"""The online softmax of a tile of queries, one tile of context after the other: shared by the Triton kernels.

Runs inside kernels only. Triton's blocks are powers of two, so rows of other widths are padded by zeros: `Dp` numbers for D.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.pallas.kv_rows import SCALE_BYTES, is_quantised, widened
from jinfercept.pallas.layout import SCRATCH_PAGE
from jinfercept.pallas.tiles import power_of_two

LOG2_E = 1.4426950408889634
LOWEST = -1e30  # of a masked score: its weight is exactly 0


def empty_carry(rows: int, head_dim: int):
    """The initial carry of an online softmax in base 2: maximum [rows], sum [rows], weighted values [rows, Dp]."""
    return jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((rows, power_of_two(head_dim)))


def attend_tile(
    queries: Float[Array, "rows Dp"],
    pages_ref,  # [N, B, 2, K, W]
    tables_ref,  # [S · P]
    table: Int[Array, ""],
    kv_head: Int[Array, ""],
    tokens: int,
    start: Int[Array, ""],
    visible: Int[Array, "rows"] | None,
    carry,
    *,
    limit: Int[Array, ""],
):
    """The carry after `tokens` context tokens of a row, from position `start` on, for one KV head.

    Args:
        table: where the row's page table begins.
        visible: each query's last visible position, below `limit`; None if every query sees the whole tile, and `limit` is
            beyond it.
        limit: positions from here on are not read.
    """
    page_size = pages_ref.shape[1]
    head_dim = pages_ref.shape[4] - (SCALE_BYTES if is_quantised(pages_ref.dtype) else 0)
    top, total, weighted = carry
    position = start + jnp.arange(tokens)
    if visible is None:
        written = None
        page = tables_ref[table + position // page_size]
    else:
        written = position < limit  # slots beyond it may hold anything
        page = plgpu.load(tables_ref.at[table + position // page_size], mask=written, other=SCRATCH_PAGE)
    slot = position % page_size
    load = partial(_load_stored, pages_ref, head_dim=head_dim, mask=written, dtype=queries.dtype)
    key, key_scale = load((page, slot, 0, kv_head))  # [tokens, D], [tokens] if quantised
    value, value_scale = load((page, slot, 1, kv_head))

    exact = jax.lax.Precision.HIGHEST
    scores = plgpu.dot(queries, key, trans_b=True, precision=exact) * (head_dim**-0.5 * LOG2_E)  # [rows, tokens]
    if key_scale is not None:
        scores *= key_scale[None, :]
    if visible is not None:
        scores = jnp.where(position[None, :] <= visible[:, None], scores, LOWEST)
    new_top = jnp.maximum(top, scores.max(axis=1))
    weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
    scaled = weights if value_scale is None else weights * value_scale[None, :]
    added = plgpu.dot(scaled.astype(value.dtype), value, precision=exact)
    return new_top, total * fade + weights.sum(axis=1), weighted * fade[:, None] + added


def _load_stored(
    ref, where, *, head_dim: int, mask: Array | None, dtype: DTypeLike
) -> tuple[Float[Array, "rows Dp"], Float[Array, "rows"] | None]:
    """Rows of pages as numbers; of quantised pages widened to `dtype`, and their scales: no program writes wide ones."""
    rows = load_rows(ref, where, head_dim, mask)
    if not is_quantised(ref.dtype):
        return rows, None
    bits = jnp.uint32(0)
    for place in range(SCALE_BYTES):
        byte = plgpu.load(ref.at[(*where, head_dim + place)], mask=mask, other=None if mask is None else 0)
        bits |= (byte.astype(jnp.uint32) & 0xFF) << 8 * place
    return widened(rows, dtype), jax.lax.bitcast_convert_type(bits, jnp.float32)


def load_rows(ref, where, head_dim: int, mask: Array | None) -> Float[Array, "rows Dp"]:
    """Rows of `head_dim` numbers, padded by zeros to a power of two; zeros where the mask [rows] is false."""
    where, inside = _columns(where, head_dim, mask)
    return plgpu.load(ref.at[where], mask=inside, other=None if inside is None else jnp.zeros((), ref.dtype))


def store_rows(ref, where, head_dim: int, mask: Array, rows: Float[Array, "rows Dp"]) -> None:
    """Write rows without their padding, where the mask [rows] is true."""
    where, inside = _columns(where, head_dim, mask)
    plgpu.store(ref.at[where], rows.astype(ref.dtype), mask=inside)


def _columns(where, head_dim: int, mask: Array | None):
    """The index and the mask of whole padded rows."""
    width = power_of_two(head_dim)
    column = jnp.arange(width)[None, :]
    where = tuple(index if jnp.ndim(index) == 0 else index[:, None] for index in where)
    masks = [] if mask is None else [mask[:, None]]
    if width > head_dim:
        masks.append(column < head_dim)
    return (*where, column), reduce(jnp.logical_and, masks) if masks else None
