"""A Llama that learns an adapter: its layers stacked and scanned, products in one number type, gradients for the adapter alone.

Weights stay as they are, and an adapter's products are computed beside theirs: merging it would cost gradients of all weights.
Dialogues about the same tools share the tokens that declare them: a row holds documents, and these a beginning and branches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from examples.tool_adapter.adapter import Adapter, LowRank
from jinfercept.models.config import ModelConfig
from jinfercept.models.protocol import Params
from jinfercept.models.rope import frequencies

_BLOCK = 128
"""Queries that attend together on a CPU."""


class Frozen(NamedTuple):
    """Weights that do not learn.

    Attributes:
        embedding: `[V, E]`.
        layers: by name, stacked: norms `[L, E]`, `qkv` `[L, E, (H + 2 K) D]`, `o`, `gate_up` `[L, E, 2 F]`, `down`.
        norm: `[E]`.
        unembed: `[V, E]`.
    """

    embedding: Float[Array, "V E"]
    layers: dict[str, Array]
    norm: Float[Array, "E"]
    unembed: Float[Array, "V E"]


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        ids: of the tokens; 0 behind the last document of a row.
        positions: of every token in its dialogue.
        documents: the number of its document in the row, from 1; 0 for padding.
        branches: the number of its dialogue in the document, from 1; 0 for the beginning that they share.
        learnt: whether the next token is one of the same dialogue that the agent wrote: prompts are not learnt.
    """

    ids: Int[np.ndarray, "B R"]
    positions: Int[np.ndarray, "B R"]
    documents: Int[np.ndarray, "B R"]
    branches: Int[np.ndarray, "B R"]
    learnt: Bool[np.ndarray, "B R"]


def frozen(params: Params, dtype: DTypeLike) -> Frozen:
    """The weights of a model that are apart (`joined_weights.separate`), stacked, in a number type."""

    def stack(*parts: str) -> Array:
        rows = [
            np.concatenate([np.asarray(layer[part]).reshape(len(layer[part]), -1) for part in parts], axis=1)
            for layer in params.layers
        ]
        return jnp.asarray(np.stack(rows), dtype)

    def norms(name: str) -> Array:
        return jnp.asarray(np.stack([np.asarray(layer[name]) for layer in params.layers]), jnp.float32)

    hidden = params.embed["embedding"].shape[1]
    o = np.stack([np.asarray(layer["o"]).reshape(-1, hidden) for layer in params.layers])
    layers = {
        "attn_norm": norms("attn_norm"),
        "ffn_norm": norms("ffn_norm"),
        "qkv": stack("q", "k", "v"),
        "o": jnp.asarray(o, dtype),
        "gate_up": stack("gate", "up"),
        "down": stack("down"),
    }
    norm = jnp.asarray(params.head["norm"], jnp.float32)
    return Frozen(
        *(jnp.asarray(params.embed["embedding"], dtype), layers, norm, jnp.asarray(params.head["unembed"], dtype))
    )


class TokenLosses(NamedTuple):
    """Of the learnt tokens of a batch, and up to a fixed number of others.

    Attributes:
        losses: negative log-likelihoods, in nats.
        places: of the token before each, in the flattened rows.
        is_there: whether it is a learnt token.
    """

    losses: Float[Array, "M"]
    places: Int[Array, "M"]
    is_there: Bool[Array, "M"]


def loss(
    config: ModelConfig, weights: Frozen, adapter: Adapter, scale: float, batch: Batch, most_learnt: int
) -> Float[Array, ""]:
    """Negative log-likelihood of the tokens that the agent wrote, in nats, summed. Arguments as of `token_losses`."""
    tokens = token_losses(config, weights, adapter, scale, batch, most_learnt)
    return jnp.sum(tokens.losses * tokens.is_there)


def token_losses(
    config: ModelConfig, weights: Frozen, adapter: Adapter, scale: float, batch: Batch, most_learnt: int
) -> TokenLosses:
    """Negative log-likelihood of each token that the agent wrote.

    Args:
        scale: of the adapter.
        most_learnt: tokens of the batch that may be learnt; only their logits are computed.
    """
    dtype = weights.embedding.dtype
    rows, width = batch.ids.shape
    ids, documents, branches = jnp.asarray(batch.ids), jnp.asarray(batch.documents), jnp.asarray(batch.branches)
    angles = jnp.asarray(batch.positions, jnp.float32)[:, :, None, None] * frequencies(config.rope)
    waves = jnp.cos(angles), jnp.sin(angles)
    same = documents[:, None, :] == documents[:, :, None]
    followed = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    visible = (same & followed & jnp.tril(jnp.ones((width, width), bool)))[:, None]
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim

    def layer(x: Array, parts: tuple[dict[str, Array], dict[str, LowRank]]) -> tuple[Array, None]:
        layer, added = parts
        normed = _norm(x, layer["attn_norm"], config.norm_eps, dtype)
        qkv = normed @ layer["qkv"] + _beside(normed, (added["q"], added["k"], added["v"]), scale)
        q, k, v = jnp.split(qkv.reshape(rows, width, -1, size), (heads, heads + kv_heads), axis=2)
        mixed = _attend(_turned(q, waves), _turned(k, waves), v, visible).reshape(rows, width, -1)
        x = x + (mixed @ layer["o"] + _beside(mixed, (added["o"],), scale)).astype(jnp.float32)
        normed = _norm(x, layer["ffn_norm"], config.norm_eps, dtype)
        gate_up = normed @ layer["gate_up"] + _beside(normed, (added["gate"], added["up"]), scale)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        inner = jax.nn.silu(gate) * up
        return x + (inner @ layer["down"] + _beside(inner, (added["down"],), scale)).astype(jnp.float32), None

    x = weights.embedding[ids].astype(jnp.float32)
    x, _ = jax.lax.scan(layer, x, (weights.layers, adapter))
    learnt = jnp.asarray(batch.learnt).reshape(-1)
    (chosen,) = jnp.nonzero(learnt, size=most_learnt, fill_value=0)
    is_there = jnp.arange(most_learnt) < learnt.sum()
    last = _norm(x.reshape(rows * width, -1)[chosen], weights.norm, config.norm_eps, dtype)
    logits = jnp.einsum("te,ve->tv", last, weights.unembed, preferred_element_type=jnp.float32)
    targets = jnp.roll(ids, -1, axis=1).reshape(-1)[chosen]
    return TokenLosses(optax.softmax_cross_entropy_with_integer_labels(logits, targets), chosen, is_there)


def _norm(x: Array, weight: Array, eps: float, dtype: Any) -> Array:
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight).astype(dtype)


def _beside(x: Array, parts: tuple[LowRank, ...], scale: float) -> Array:
    """What the adapter adds to a product, of parts whose outputs lie side by side."""
    inner = x @ jnp.concatenate([part.a for part in parts], axis=1).astype(x.dtype)
    b = jax.scipy.linalg.block_diag(*(part.b for part in parts)) * scale
    return inner @ b.astype(x.dtype)


def _turned(x: Array, waves: tuple[Array, Array]) -> Array:
    cos, sin = waves
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    if jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, mask=visible)
    parts = []  # what comes later than a block of queries is not computed: half the time of a CPU
    for start in range(0, q.shape[1], _BLOCK):
        stop = start + _BLOCK
        parts.append(_attend_block(q[:, start:stop], k[:, :stop], v[:, :stop], visible[:, :, start:stop, :stop]))
    return jnp.concatenate(parts, axis=1)


def _attend_block(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """As `jax.nn.dot_product_attention`, the queries of a KV head in one product."""
    rows, num, heads, size = q.shape
    kv_heads, length = k.shape[2], k.shape[1]
    q = (q * size**-0.5).transpose(0, 2, 1, 3).reshape(rows, kv_heads, -1, size)
    scores = jnp.einsum("bkqd,bskd->bkqs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, :, None], scores.reshape(rows, kv_heads, -1, num, length), -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(rows, kv_heads, -1, length)
    mixed = jnp.einsum("bkqs,bskd->bkqd", shares, v)
    return mixed.reshape(rows, heads, num, size).transpose(0, 2, 1, 3)
