"""Llama: RMS norm, rotary grouped-query attention, gated SiLU (arXiv 2302.13971, 2307.09288).

SmolLM2, Vicuna and Mistral are the same; Ministral 3 has longer queries behind its original context. Qwen2 adds biases to the
projections of attention (arXiv 2407.10671), Qwen3 norms of queries and keys (arXiv 2505.09388); the other projections may have
biases too. OLMo 2 norms outputs in place of inputs, and queries and keys over all heads (arXiv 2501.00656). Granite multiplies
what is added to the stream. Mixtral (arXiv 2401.04088) and Qwen3-MoE have experts in place of the one feed-forward network
(`experts.py`). Some layers of SmolLM3 turn nothing, and OLMo 3's with a window turn in another way: their kind says so.

Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786) have norms around attention and feed-forward, GELU gates and scaled
embeddings; their norms multiply by one plus their weight, in float32. Gemma 2 caps scores and logits; in Gemma 2 and 3 some
layers are windowed. Qwen3-Next has the same norms, and gates for the results of attention.

Weights lie `[in, out]`, those of the same rows joined (`joined_weights.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import (
    Attend,
    AttendJoined,
    Block,
    NotesExperts,
    project,
    project_gated,
    rms_norms_of_all_heads,
    separate_heads,
)
from jinfercept.models.config import ExpertsConfig, LayerKind, ModelConfig
from jinfercept.models.experts import Choices, ExpertWeights, choose, combined
from jinfercept.models.parallel import add_partial_sums, gather_columns, on_first_device, sum_of_devices
from jinfercept.models.rope import grown, rotate, rotation
from jinfercept.pallas.layouts.rows import Normed, Rows, dense, gated, rms_normed
from jinfercept.pallas.layouts.scoring import Scoring


class LlamaLayer(Block):
    """Attention, then the gated feed-forward network, each between its norms and added to the stream."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        config = config.of_kind(kind)
        self.config, self.joined = config, joined
        self.rope, self.scoring = kind.rope or config.rope, Scoring(kind.window, config.soft_cap)
        self.experts = None if kind.is_dense else config.experts
        self.has_mixer, self.has_ffn = kind.has_mixer, kind.has_ffn
        norms = (*["attn_norm"] * kind.has_mixer, *["ffn_norm"] * kind.has_ffn) if config.pre_norms else ()
        post_norms = ("attn_post_norm", "ffn_post_norm") if config.post_norms else ()
        of_mixer = self._attention_weights() if kind.has_mixer else ()
        of_ffn = self._ffn_weights() if kind.has_ffn else ()
        self.make_weights((*norms, *post_norms, *of_mixer, *of_ffn), config, dtype)

    def _attention_weights(self) -> list[str]:
        config, names = self.config, ["qkv"] if self.joined else ["q", "k", "v"]
        if config.qkv_bias:
            names += [f"{name}_bias" for name in names]
        if config.qk_norm:
            names += ["q_norm", "k_norm"]
        if config.qk_row_norm:
            names += ["q_row_norm", "k_row_norm"]
        return [*names, *["sinks"] * config.sinks, "o", *["o_bias"] * config.o_bias]

    def _ffn_weights(self) -> list[str]:
        sides = ["up"] if self.config.activation == "relu2" else ["gate", "up"]
        joined = "_".join(sides)
        if (experts := self.experts) is not None:
            names, biased = ["router", f"experts_{joined}", "experts_down"], experts.biased
            names += ["latent_in", "latent_out"] if experts.latent_size else []
            if experts.shared_ffn_size:
                names += [f"shared_{name}" for name in (*sides, "down")]
                names += ["shared_factor"] if experts.scale is None else []
            names += ["router_correction"] if experts.scale is not None else []
        else:
            names, biased = [*([joined] if self.joined else sides), "down"], self.config.mlp_bias
        return [*names, *(f"{name}_bias" for name in names if biased)]

    def __call__[KV](
        self, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        if self.has_mixer:
            attended, kv = self._attended(self._rows(x, self.attn_norm), positions, kv, attend)
            x = self._added(x, self._summed(attended), self.attn_post_norm)
        if self.has_ffn:
            x = self._added(x, self._fed(self._rows(x, self.ffn_norm), attend), self.ffn_post_norm)
        return x, kv

    def _summed(self, attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        return biased_once(project("thd,hde->te", attended, self.o), self.o_bias)

    def _fed(self, y: Rows, attend: object) -> Float[Array, "T E"]:
        if (experts := self.experts) is None:
            return self._of_network(y)
        rows = dense(y)
        correction = None if self.router_correction is None else self.router_correction[...]
        choices = choose(
            project("te,ex->tx", rows, self.router, self.router_bias, out=jnp.float32), experts, correction
        )
        latent = rows if self.latent_in is None else project("te,el->tl", rows, self.latent_in)
        fed = self._of_experts(latent, choices, experts, attend)
        fed = fed if self.latent_out is None else project("tl,le->te", fed, self.latent_out)
        return fed + self._shared(rows) if experts.shared_ffn_size else fed

    def _of_experts(
        self, rows: Float[Array, "T E"], choices: Choices, experts: ExpertsConfig, attend: object
    ) -> Float[Array, "T E"]:
        if isinstance(attend, NotesExperts):
            attend.note_experts(choices.experts)
        gate_up = self.experts_up if self.experts_gate_up is None else self.experts_gate_up
        params = (gate_up, self.experts_down, self.experts_gate_up_bias, self.experts_down_bias)
        weights = ExpertWeights(*(None if param is None else param.get_value() for param in params))
        return combined(rows, choices, weights, experts)

    def _of_network(self, y: Rows) -> Float[Array, "T E"]:
        activation = self.config.activation
        if self.gate_up is not None:
            fed = project_gated(y, self.gate_up, self.down, self.gate_up_bias, activation=activation)
        else:
            inner = self._inner(y, (self.gate, self.gate_bias), (self.up, self.up_bias))
            fed = project("tf,fe->te", inner, self.down)
        return biased_once(fed, self.down_bias)

    def _inner(self, y: Rows, gate: tuple[Any, ...], up: tuple[Any, ...]) -> Float[Array, "T F"]:
        # networks without gates have no gate's weight
        sides = [project("te,ef->tf", y, *side) for side in (gate, up) if side[0] is not None]
        return gated(*sides, activation=self.config.activation)

    def _shared(self, y: Float[Array, "T E"]) -> Float[Array, "T E"]:
        fed = project("tf,fe->te", self._inner(y, (self.shared_gate,), (self.shared_up,)), self.shared_down)
        return fed if self.shared_factor is None else jax.nn.sigmoid(project("te,ef->tf", y, self.shared_factor)) * fed

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        config, eps, rope = self.config, self.config.norm_eps, self.rope
        scoring = self.scoring if self.sinks is None else self.scoring._replace(sinks=self.sinks[...])
        fused = scoring.is_plain and not (config.qk_row_norm or config.norms_plus_one or rope.query_growth)
        if self.joined and fused and isinstance(attend, AttendJoined):
            turn = rotation(positions, rope)
            if self.q_norm is not None:
                turn = turn._replace(q_norm=self.q_norm[...], k_norm=self.k_norm[...], eps=eps)
            return attend.joined(project("te,ekgd->tkgd", y, self.qkv, self.qkv_bias), turn, kv)
        (q, k, v), gates = heads_of(self, y), None
        if config.attention_gate:
            q = q.reshape(len(q), -1, 2, q.shape[-1])
            q, gates = q[:, :, 0], q[:, :, 1]
        if self.q_norm is not None:
            q, k = normed(q, self.q_norm, config), normed(k, self.k_norm, config)
        if self.q_row_norm is not None:
            q, k = rms_norms_of_all_heads(q, k, self.q_row_norm, self.k_row_norm, eps)
        q, k = rotate(grown(q, positions, rope), positions, rope), rotate(k, positions, rope)
        if config.query_scale is not None:  # attention divides by the root of D
            q = q * jnp.asarray(config.query_scale * q.shape[-1] ** 0.5, q.dtype)
        attended, kv = attend(q, k, v, kv) if scoring.is_plain else attend(q, k, v, kv, scoring)
        return attended if gates is None else attended * jax.nn.sigmoid(gates), kv

    def _rows(self, x: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None) -> Rows:
        return x if norm is None else normed_rows(x, norm, self.config)

    def _added(
        self, x: Float[Array, "T E"], y: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]] | None
    ) -> Float[Array, "T E"]:
        if self.config.residual_multiplier != 1.0:
            y = y * self.config.residual_multiplier
        return add_partial_sums(x, y) if norm is None else x + normed(sum_of_devices(y), norm, self.config)


def heads_of(layer: Block, y: Rows) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
    """Queries, keys and values of a layer, whose weights for them are joined or apart."""
    if layer.qkv is not None:
        return separate_heads(project("te,ekgd->tkgd", y, layer.qkv, layer.qkv_bias))
    k, v = project("te,ekd->tkd", y, layer.k, layer.k_bias), project("te,ekd->tkd", y, layer.v, layer.v_bias)
    return project("te,ehd->thd", y, layer.q, layer.q_bias), k, v


def normed_rows(x: Float[Array, "T E"], norm: nnx.Param[Float[Array, "E"]], config: ModelConfig) -> Rows:
    """Rows behind the model's norm; a product may compute the usual one."""
    return normed(x, norm, config) if config.norms_plus_one else Normed(x, norm[...], config.norm_eps)


def normed(x: Float[Array, "... E"], norm: nnx.Param[Float[Array, "E"]], config: ModelConfig) -> Float[Array, "... E"]:
    """The last axis behind the model's norm."""
    if not config.norms_plus_one:
        return rms_normed(x, norm[...], config.norm_eps)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    return (wide * jnp.expand_dims(1.0 + norm[...].astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def biased_once(y: Float[Array, "T E"], bias: nnx.Param[Float[Array, "E"]] | None) -> Float[Array, "T E"]:
    """A partial sum over devices with its bias, which one device adds, in models that have one."""
    return y if bias is None else y + on_first_device(bias[...])[None]


class LlamaHead(Block):
    """The final norm and the logits, which Gemma 2 caps."""

    names = ("norm", "unembed")

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.make_weights(self.names, config, dtype)

    def __call__(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        logits = project("re,ve->rv", normed_rows(x, self.norm, self.config), self.unembed, out=jnp.float32)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        logits, cap = gather_columns(logits, self.config.vocab_size), self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
