"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786): norms around attention and feed-forward, GELU gates, scaled
embeddings.

Norms multiply by one plus their weight, in float32. Gemma 2 caps scores and logits; in Gemma 2 and 3 some layers are windowed.
Weights are those of `llama`, and norms behind both halves of a layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jinfercept.layouts.rows import Rows
from jinfercept.models.blocks import Attend, Embed, project
from jinfercept.models.llama import LlamaHead, LlamaLayer
from jinfercept.models.parallel import gather_columns
from jinfercept.models.rope import rotate


class GemmaEmbed(Embed):
    """Token ids to vectors, multiplied by the root of their width as their dtype has it."""

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        x = super().__call__(tokens)
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


class GemmaLayer(LlamaLayer):
    """Attention, then the gated feed-forward network, each between two norms (Gemma 1: behind one) and added to the stream."""

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

    def _rows(self, x: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None) -> Rows:
        return x if norm is None else self._normed(x, norm)

    def _normed(self, x: Float[Array, "... E"], norm: nnx.Param[Float[Array, "E"]]) -> Float[Array, "... E"]:
        return plus_one_normed(x, norm[...], self.config.norm_eps)


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
