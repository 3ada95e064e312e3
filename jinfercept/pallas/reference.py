"""The oracle that every implementation of paged attention is tested against: gather, mask, softmax in float32.

It computes one token at a time and shares nothing between tokens, so that there is little to get wrong. It also serves backends
without an implementation of their own, slowly.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.pallas.layouts.interleaved import apart, is_interleaved
from jinfercept.pallas.layouts.kv_rows import dequantised
from jinfercept.pallas.layouts.pages import Batch, HeadRows, KVPages, Scalar
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

TOKENS_AT_ONCE = 64  # bounds the gathered contexts to this many times P · B tokens


def paged_attention_reference(q: HeadRows, pages: KVPages, batch: Batch, scoring: Scoring = PLAIN) -> HeadRows:
    """Causal attention of every query token over its row's pages, scaled by 1/√D; padding tokens give zeros.

    Args:
        q: query head `h` reads KV head `h // (H / K)`.
        pages: one layer's pages, with the step's own keys and values.
        batch: a token at position `p` sees positions `0..p` of its row.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // (pages.shape[2] // 2 if is_interleaved(pages) else pages.shape[3])
    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(batch.query_starts, token, side="right") - 1

    def attend(query: Float[Array, "H D"], position: Scalar, table: Int[Array, "P"]) -> Float[Array, "H D"]:
        context = pages[table]
        context = apart(context)[..., :head_dim] if is_interleaved(pages) else context
        context = dequantised(context)
        context = context.reshape(-1, *context.shape[2:])  # [P·B, 2, K, D]
        places = jnp.arange(context.shape[0])
        visible = places <= position
        if scoring.window is not None:
            visible &= places > position - scoring.window
        context = jnp.where(visible[:, None, None, None], context, 0.0)  # unwritten slots may hold anything
        key, value = (jnp.repeat(context[:, side], group, axis=1) for side in (0, 1))
        scores = jnp.einsum("hd,chd->hc", query.astype(jnp.float32), key, precision="highest") * head_dim**-0.5
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.astype(jnp.float32)[:, None]
            weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[:, :-1]
        else:
            weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("hc,chd->hd", weights, value, precision="highest")

    operands = (q, batch.positions, batch.page_tables[row])
    out = jax.lax.map(lambda operand: attend(*operand), operands, batch_size=TOKENS_AT_ONCE)
    used = token < batch.query_starts[-1]
    return jnp.where(used[:, None, None], out, 0.0).astype(q.dtype)
