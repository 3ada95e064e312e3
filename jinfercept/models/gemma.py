"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786): norms around attention and feed-forward, GELU gates, scaled
embeddings.

Norms multiply by one plus their weight, in float32. Gemma 2 caps scores and logits; in Gemma 2 and 3 some layers are windowed.
Weights are those of `llama`, and norms behind both halves of a layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.layouts.rows import Rows
from jinfercept.models.blocks import Attend, Embed, project
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.llama import LlamaHead, LlamaLayer, biased_once
from jinfercept.models.parallel import add_partial_sums, gather_columns
from jinfercept.models.rope import rotate


class GemmaEmbed(Embed):
    """Token ids to vectors, multiplied by the root of their width as their dtype has it."""

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        x = super().__call__(tokens)
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


class GemmaLayer(LlamaLayer):
    """Attention, then the gated feed-forward network, each between two norms (Gemma 1: behind one) and added to the stream."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        super().__init__(config, dtype, kind=kind, joined=joined)
        e = config.hidden_size
        self.attn_post_norm = nnx.Param(jnp.zeros(e, dtype)) if config.post_norms else None
        self.ffn_post_norm = nnx.Param(jnp.zeros(e, dtype)) if config.post_norms else None

    def __call__[KV](
        self, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        attended, kv = self._attended(self._normed(x, self.attn_norm), positions, kv, attend)
        out = biased_once(project("thd,hde->te", attended, self.o), self.o_bias)
        x = self._added(x, out, self.attn_post_norm)
        return self._added(x, self._fed(self._normed(x, self.ffn_norm)), self.ffn_post_norm), kv

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        q, k, v = self._heads(y)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k = rotate(q, positions, self.rope), rotate(k, positions, self.rope)
        if self.config.query_scale is not None:  # attention divides by the root of D
            q = q * jnp.asarray(self.config.query_scale * q.shape[-1] ** 0.5, q.dtype)
        return attend(q, k, v, kv) if self.scoring.is_plain else attend(q, k, v, kv, self.scoring)

    def _normed(self, x: Float[Array, "... E"], weight: nnx.Param[Float[Array, "E"]]) -> Float[Array, "... E"]:
        return plus_one_normed(x, weight[...], self.config.norm_eps)

    def _added(
        self, x: Float[Array, "T E"], y: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None
    ) -> Float[Array, "T E"]:
        """The stream with a partial sum, which is summed before its norm."""
        if norm is None:
            return add_partial_sums(x, y)
        return x + self._normed(add_partial_sums(jnp.zeros_like(x), y), norm)


class GemmaHead(LlamaHead):
    """The final norm and the logits, which Gemma 2 caps."""

    def __call__(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        y, cap = plus_one_normed(x, self.norm[...], self.config.norm_eps), self.config.logit_cap
        logits = gather_columns(project("re,ve->rv", y, self.unembed, out=jnp.float32), self.config.vocab_size)
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def plus_one_normed(x: Float[Array, "... K"], weight: Float[Array, "K"], eps: float) -> Float[Array, "... K"]:
    """Root-mean-square norm of the last axis times one plus a weight, in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * jnp.expand_dims(1.0 + weight.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)
