"""Llama: RMS norm, rotary grouped-query attention, gated SiLU (arXiv 2302.13971, 2307.09288).

SmolLM2, Vicuna and Mistral are the same; Ministral 3 has longer queries behind its original context; Qwen2 adds biases to the
projections of attention (arXiv 2407.10671), Qwen3 norms of queries and keys (arXiv 2505.09388); the other projections may have
biases too. OLMo 2 norms outputs in place of inputs, and queries and keys over all heads (arXiv 2501.00656); Granite multiplies
what is added to the stream. Mixtral (arXiv 2401.04088) and Qwen3-MoE have experts in place of the one feed-forward network
(`experts.py`). Some layers of SmolLM3 turn nothing, and OLMo 3's with a window turn in another way than the others: their kind
says so. Weights lie `[in, out]`, those of the same rows joined (`joined_weights.py`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.layouts.rows import Normed, Rows, dense, gated, rms_normed
from jinfercept.layouts.scoring import Scoring
from jinfercept.models.blocks import (
    Attend,
    AttendJoined,
    NotesExperts,
    project,
    project_gated,
    rms_norms_of_all_heads,
    separate_heads,
)
from jinfercept.models.config import LayerKind, ModelConfig
from jinfercept.models.experts import ExpertWeights, choose, combined
from jinfercept.models.parallel import add_partial_sums, gather_columns, on_first_device, sum_of_devices
from jinfercept.models.rope import grown, rotate, rotation


class LlamaLayer(nnx.Module):
    """Attention, then the gated feed-forward network, each between its norms and added to the stream."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        self.config, self.joined = config, joined
        self.rope, self.scoring = kind.rope or config.rope, Scoring(kind.window, config.soft_cap)
        self.experts = None if kind.is_dense else config.experts
        e = config.hidden_size
        self.attn_norm = nnx.Param(jnp.zeros(e, dtype)) if config.pre_norms else None
        self._make_attention(dtype)
        self.attn_post_norm = nnx.Param(jnp.zeros(e, dtype)) if config.post_norms else None
        self.ffn_norm = nnx.Param(jnp.zeros(e, dtype)) if config.pre_norms else None
        self.ffn_post_norm = nnx.Param(jnp.zeros(e, dtype)) if config.post_norms else None
        self._make_feed_forward(dtype)

    def _make_attention(self, dtype: DTypeLike) -> None:
        config = self.config
        e, k, d = config.hidden_size, config.num_kv_heads, config.head_dim
        h = config.num_heads * (2 if config.attention_gate else 1)  # every head's gates behind its queries
        if self.joined:
            self.qkv = nnx.Param(jnp.zeros((e, k, h // k + 2, d), dtype))
            self.qkv_bias = nnx.Param(jnp.zeros((k, h // k + 2, d), dtype)) if config.qkv_bias else None
        else:
            self.q = nnx.Param(jnp.zeros((e, h, d), dtype))
            self.k = nnx.Param(jnp.zeros((e, k, d), dtype))
            self.v = nnx.Param(jnp.zeros((e, k, d), dtype))
            self.q_bias = nnx.Param(jnp.zeros((h, d), dtype)) if config.qkv_bias else None
            self.k_bias = nnx.Param(jnp.zeros((k, d), dtype)) if config.qkv_bias else None
            self.v_bias = nnx.Param(jnp.zeros((k, d), dtype)) if config.qkv_bias else None
        self.q_norm = nnx.Param(jnp.zeros(d, dtype)) if config.qk_norm else None
        self.k_norm = nnx.Param(jnp.zeros(d, dtype)) if config.qk_norm else None
        self.q_row_norm = nnx.Param(jnp.zeros((h, d), dtype)) if config.qk_row_norm else None
        self.k_row_norm = nnx.Param(jnp.zeros((k, d), dtype)) if config.qk_row_norm else None
        self.sinks = nnx.Param(jnp.zeros(h, dtype)) if config.sinks else None
        self.o = nnx.Param(jnp.zeros((config.num_heads, d, e), dtype))
        self.o_bias = nnx.Param(jnp.zeros(e, dtype)) if config.o_bias else None

    def _make_feed_forward(self, dtype: DTypeLike) -> None:
        config, e, f = self.config, self.config.hidden_size, self.config.ffn_size
        if (experts := self.experts) is not None:
            count, columns = experts.num_experts * experts.parts, experts.ffn_size // experts.parts
            self.router = nnx.Param(jnp.zeros((e, experts.num_experts), dtype))
            self.experts_gate_up = nnx.Param(jnp.zeros((count, e, 2, columns), dtype))
            self.experts_down = nnx.Param(jnp.zeros((count, columns, e), dtype))
            self.router_bias = nnx.Param(jnp.zeros(experts.num_experts, dtype)) if experts.biased else None
            self.experts_gate_up_bias = nnx.Param(jnp.zeros((count, 2, columns), dtype)) if experts.biased else None
            self.experts_down_bias = nnx.Param(jnp.zeros((count, e), dtype)) if experts.biased else None
            if f := experts.shared_ffn_size:
                self.shared_gate = nnx.Param(jnp.zeros((e, f), dtype))
                self.shared_up = nnx.Param(jnp.zeros((e, f), dtype))
                self.shared_down = nnx.Param(jnp.zeros((f, e), dtype))
                self.shared_factor = nnx.Param(jnp.zeros((e, 1), dtype))
            return
        if self.joined:
            self.gate_up = nnx.Param(jnp.zeros((2, e, f), dtype))
            self.gate_up_bias = nnx.Param(jnp.zeros((2, f), dtype)) if config.mlp_bias else None
        else:
            self.gate = nnx.Param(jnp.zeros((e, f), dtype))
            self.up = nnx.Param(jnp.zeros((e, f), dtype))
            self.gate_bias = nnx.Param(jnp.zeros(f, dtype)) if config.mlp_bias else None
            self.up_bias = nnx.Param(jnp.zeros(f, dtype)) if config.mlp_bias else None
        self.down = nnx.Param(jnp.zeros((f, e), dtype))
        self.down_bias = nnx.Param(jnp.zeros(e, dtype)) if config.mlp_bias else None

    def __call__[KV](
        self, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        attended, kv = self._attended(self._rows(x, self.attn_norm), positions, kv, attend)
        x = self._added(x, self._summed(attended), self.attn_post_norm)
        return self._added(x, self._fed(self._rows(x, self.ffn_norm), attend), self.ffn_post_norm), kv

    def _summed(self, attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        """The partial sum over the heads."""
        return biased_once(project("thd,hde->te", attended, self.o), self.o_bias)

    def _fed(self, y: Rows, attend: object) -> Float[Array, "T E"]:
        """The partial sum of the feed-forward network."""
        if (experts := self.experts) is not None:
            rows = dense(y)
            choices = choose(project("te,ex->tx", rows, self.router, self.router_bias, out=jnp.float32), experts)
            if isinstance(attend, NotesExperts):
                attend.note_experts(choices.experts)
            params = (self.experts_gate_up, self.experts_down, self.experts_gate_up_bias, self.experts_down_bias)
            weights = ExpertWeights(*(None if param is None else param.get_value() for param in params))
            fed = combined(rows, choices, weights, experts)
            return fed + self._shared(rows) if experts.shared_ffn_size else fed
        activation = self.config.activation
        if self.joined:
            fed = project_gated(y, self.gate_up, self.down, self.gate_up_bias, activation=activation)
        else:
            gate, up = (
                project("te,ef->tf", y, self.gate, self.gate_bias),
                project("te,ef->tf", y, self.up, self.up_bias),
            )
            fed = project("tf,fe->te", gated(gate, up, activation), self.down)
        return biased_once(fed, self.down_bias)

    def _shared(self, y: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The partial sum of the expert that computes every token, times its gate."""
        gate, up = project("te,ef->tf", y, self.shared_gate), project("te,ef->tf", y, self.shared_up)
        factor = jax.nn.sigmoid(project("te,ef->tf", y, self.shared_factor))
        return factor * project("tf,fe->te", gated(gate, up, self.config.activation), self.shared_down)

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        """The result of attention for the normed rows."""
        eps, rope = self.config.norm_eps, self.rope
        scoring = self.scoring if self.sinks is None else self.scoring._replace(sinks=self.sinks[...])
        fused = scoring.is_plain and not self.config.qk_row_norm and not rope.query_growth
        if self.joined and fused and isinstance(attend, AttendJoined):
            turn = rotation(positions, rope)
            if self.q_norm is not None and self.k_norm is not None:
                turn = turn._replace(q_norm=self.q_norm[...], k_norm=self.k_norm[...], eps=eps)
            return attend.joined(project("te,ekgd->tkgd", y, self.qkv, self.qkv_bias), turn, kv)
        q, k, v = self._heads(y)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.q_row_norm is not None and self.k_row_norm is not None:
            q, k = rms_norms_of_all_heads(q, k, self.q_row_norm, self.k_row_norm, eps)
        q, k = rotate(grown(q, positions, rope), positions, rope), rotate(k, positions, rope)
        return attend(q, k, v, kv) if scoring.is_plain else attend(q, k, v, kv, scoring)

    def _rows(self, x: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None) -> Rows:
        """What goes into a product, normed in models that do so."""
        return x if norm is None else Normed(x, norm[...], self.config.norm_eps)

    def _normed(self, x: Float[Array, "... E"], norm: nnx.Param[Float[Array, "E"]]) -> Float[Array, "... E"]:
        return rms_normed(x, norm[...], self.config.norm_eps)

    def _added(
        self, x: Float[Array, "T E"], y: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None
    ) -> Float[Array, "T E"]:
        """The stream with a partial sum, which is multiplied or whose sum is normed first in models that do so."""
        if self.config.residual_multiplier != 1.0:
            y = y * self.config.residual_multiplier
        return add_partial_sums(x, y) if norm is None else x + self._normed(sum_of_devices(y), norm)

    def _heads(self, y: Rows) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """Queries, keys and values."""
        if self.joined:
            return separate_heads(project("te,ekgd->tkgd", y, self.qkv, self.qkv_bias))
        k, v = project("te,ekd->tkd", y, self.k, self.k_bias), project("te,ekd->tkd", y, self.v, self.v_bias)
        return project("te,ehd->thd", y, self.q, self.q_bias), k, v


def biased_once(y: Float[Array, "T E"], bias: nnx.Param[Float[Array, "E"]] | None) -> Float[Array, "T E"]:
    """A partial sum with its bias, in models that have one."""
    return y if bias is None else y + on_first_device(bias[...])[None]


class LlamaHead(nnx.Module):
    """The final norm and the logits."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        e, v = config.hidden_size, config.vocab_size
        self.norm = nnx.Param(jnp.zeros(e, dtype))
        self.unembed = nnx.Param(jnp.zeros((v, e), dtype))

    def __call__(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        y = Normed(x, self.norm[...], self.config.norm_eps)
        logits = project("re,ve->rv", y, self.unembed, out=jnp.float32)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        return gather_columns(logits, self.config.vocab_size)
