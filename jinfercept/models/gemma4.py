"""Gemma 4: layers with a window have smaller heads, and more of them, than the others; values are normed, and layers scaled.

In 31B and 26B-A4B the layers without a window have keys that are values; in 26B-A4B experts compute a token beside the
feed-forward network. In E2B and E4B the last layers read the keys and values of earlier ones, and every layer has some numbers
of a token for itself: the embedding puts those of all layers behind the stream, and each layer takes the first and puts them
last.

An assistant is a small Gemma 4 that drafts for a larger one. It reads the larger model's vector of a token and its hidden state
of the token before; its layers attend to the larger model's keys and values. It gives logits, and the hidden state that it
reads with the next draft.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.blocks import Attend, Embed, project
from jinfercept.models.config import ExpertsConfig, LayerKind, ModelConfig
from jinfercept.models.experts import Choices, choose
from jinfercept.models.llama import LlamaHead, LlamaLayer, heads_of, normed
from jinfercept.models.parallel import look_up, sum_of_devices
from jinfercept.models.protocol import ModelDimensions
from jinfercept.models.rope import rotate
from jinfercept.pallas.layouts.rows import Rows, gated, rms_normed


class Gemma4Embed(Embed):
    """The stream, and behind it the numbers of all layers."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(config, dtype)
        self.config = config
        if config.per_layer_size:
            names = ("per_layer_embedding", "per_layer_projection", "per_layer_projection_norm")
            self.make_weights(names, config, dtype)
        if config.assistant is not None:
            self.make_weights(("pre_projection",), config, dtype)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T W"]:
        x, size = super().__call__(tokens), self.config.per_layer_size
        if not size:
            return x
        of_token = look_up(self.per_layer_embedding.get_value(), tokens) * jnp.asarray(size**0.5, x.dtype)
        of_stream = project("te,ef->tf", x, self.per_layer_projection) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        by_layer = of_stream.reshape(len(x), -1, size)
        by_layer = rms_normed(by_layer, self.per_layer_projection_norm[...], self.config.norm_eps)
        both = (by_layer.reshape(of_token.shape) + of_token) * jnp.asarray(2.0**-0.5, x.dtype)
        return jnp.concatenate([x, both], axis=1)

    def joined(self, vectors: Float[Array, "T G"], hidden: Float[Array, "T G"]) -> Float[Array, "T E"]:
        """What the layers of an assistant read: of the larger model, the tokens' vectors and the hidden states before them."""
        return project("tsg,sge->te", jnp.stack([vectors, hidden], axis=1), self.pre_projection)


class Gemma4Layer(LlamaLayer):
    """Attention, feed-forward network and experts, each between norms, and the layer's own numbers of each token."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        self.kind = kind
        super().__init__(config, dtype, kind=kind, joined=joined)

    def _attention_weights(self) -> list[str]:
        if self.kind.kv_from is not None:
            return ["q", "q_norm", "o"]
        if self.kind.keys_are_values:
            return ["q", "k", "q_norm", "k_norm", "o"]
        return super()._attention_weights()

    def _ffn_weights(self) -> list[str]:
        names = ["gate_up", "down"] if self.joined else ["gate", "up", "down"]
        if self.experts is not None:
            names += ["router", "router_norm", "router_scale", "experts_gate_up", "experts_down"]
            names += ["dense_post_norm", "experts_norm", "experts_post_norm"]
        if self.config.per_layer_size:
            names += ["per_layer_gate", "per_layer_up", "per_layer_norm"]
        return [*names, "layer_scale"]

    def __call__[KV](
        self, x: Float[Array, "T W"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T W"], KV]:
        config = self.config
        x, by_layer = x[:, : config.hidden_size], x[:, config.hidden_size :]
        attended, kv = self._attended(self._rows(x, self.attn_norm), positions, kv, attend)
        x = self._added(x, self._summed(attended), self.attn_post_norm)
        fed = self._of_network(self._rows(x, self.ffn_norm))
        if (experts := self.experts) is None:
            x = self._added(x, fed, self.ffn_post_norm)
        else:
            chosen = self._of_experts(normed(x, self.experts_norm, config), self._choices(x, experts), experts, attend)
            chosen = normed(sum_of_devices(chosen), self.experts_post_norm, config)
            both = normed(sum_of_devices(fed), self.dense_post_norm, config) + chosen
            x = x + normed(both, self.ffn_post_norm, config)
        if size := config.per_layer_size:
            own = gated(project("te,ef->tf", x, self.per_layer_gate), by_layer[:, :size], config.activation)
            x = x + normed(project("tf,fe->te", own, self.per_layer_up), self.per_layer_norm, config)
        x = x * self.layer_scale[...][None]
        return (jnp.concatenate([x, jnp.roll(by_layer, -size, axis=1)], axis=1) if size else x), kv

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        q, k, v = self._heads(y)
        q = rotate(normed(q, self.q_norm, self.config), positions, self.rope)
        if k is not None and v is not None:
            v = rms_normed(v, jnp.ones(v.shape[-1:], v.dtype), self.config.norm_eps)
            k = rotate(normed(k, self.k_norm, self.config), positions, self.rope)
        q = q * jnp.asarray(q.shape[-1] ** 0.5, q.dtype)  # by which attention divides, and this family does not
        return attend(q, k, v, kv, self.scoring)

    def _heads(
        self, y: Rows
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"] | None, Float[Array, "T K D"] | None]:
        """Queries, keys and values; without the latter two where another layer has them."""
        if self.kind.kv_from is None and not self.kind.keys_are_values:
            return heads_of(self, y)
        k = None if self.k is None else project("te,ekd->tkd", y, self.k)
        return project("te,ehd->thd", y, self.q), k, k

    def _choices(self, x: Float[Array, "T E"], experts: ExpertsConfig) -> Choices:
        rows = normed(x, self.router_norm, self.config)
        logits = project("te,ex->tx", rows, self.router, out=jnp.float32) * x.shape[-1] ** -0.5
        choices = choose(logits, experts)
        return choices._replace(factors=choices.factors * self.router_scale[...].astype(jnp.float32)[choices.experts])


class Gemma4Head(LlamaHead):
    """The head of the stream, without what layers have for themselves. That of an assistant may leave out all tokens but those
    of the likeliest clusters."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(config, dtype)
        if (assistant := config.assistant) is not None:
            clusters = ("centroids", "token_order") if assistant.num_clusters else ()
            self.make_weights(("post_projection", *clusters), config, dtype)

    def __call__(self, x: Float[Array, "R W"]) -> Float[Array, "R V"]:
        x, assistant = x[:, : self.config.hidden_size], self.config.assistant
        logits = super().__call__(x)
        if assistant is None or self.centroids is None:
            return logits
        scores = project("re,ec->rc", normed(x, self.norm, self.config), self.centroids)
        least = jax.lax.top_k(scores, assistant.likely_clusters)[0][:, -1:]
        order = self.token_order[...].astype(jnp.int32)
        clusters = jnp.zeros(logits.shape[1], jnp.int32).at[order].set(jnp.arange(len(order))[:, None])
        return jnp.where(scores[:, clusters] >= least, logits, -jnp.inf)

    def hidden(self, x: Float[Array, "R E"]) -> Float[Array, "R G"]:
        """The hidden states that an assistant reads with the next draft."""
        return project("re,eg->rg", normed(x, self.norm, self.config), self.post_projection)


def is_assistant(config: ModelDimensions) -> bool:
    """Whether a model drafts for another one, and serves nothing alone."""
    return isinstance(config, ModelConfig) and config.assistant is not None


def check_alone(config: ModelDimensions) -> None:
    """Raise `ModelError` for an assistant, which is not served alone."""
    if is_assistant(config):
        fix = 'name it as "model" of speculative_config with the method mtp, and serve the model for which it drafts'
        raise ModelError("an assistant drafts for a Gemma 4, and serves nothing alone", got="an assistant", fix=fix)


def fitted(assistant: ModelDimensions, target: ModelDimensions) -> ModelConfig:
    """The config of an assistant with the layers of the model for which it drafts: each of its layers reads the last one of
    these that has keys and values of its own and the same window.

    Args:
        target: the larger model, as its devices serve it.

    Raises:
        ConfigError: the checkpoint is no assistant, or one for other models.
    """
    if not isinstance(assistant, ModelConfig) or assistant.assistant is None or not isinstance(target, ModelConfig):
        raise _other_models("a model of Gemma 4", f"{assistant.family} for a model of {target.family}")
    expected, served = (
        f"a {sizes[0]} of {sizes[1]} dimensions and {sizes[2]} tokens"
        for sizes in (
            (assistant.family, assistant.assistant.target_size, assistant.vocab_size),
            (target.family, target.hidden_size, target.vocab_size),
        )
    )
    if served != expected:
        raise _other_models(expected, served)
    kinds = tuple(_fitted_kind(assistant, kind, target) for kind in assistant.kinds)
    return replace(assistant, num_kv_heads=target.num_kv_heads, kinds=kinds)


def _fitted_kind(assistant: ModelConfig, kind: LayerKind, target: ModelConfig) -> LayerKind:
    of_kind = [i for i, served in enumerate(target.kinds) if served.kv_from is None and served.window == kind.window]
    if not of_kind:
        raise _other_models(f"models with layers with a window of {kind.window}", "none")
    layer = target.of_kind(target.kind(of_kind[-1]))
    if assistant.of_kind(kind).head_dim != layer.head_dim or assistant.num_heads % layer.num_kv_heads:
        sizes = f"{layer.num_kv_heads} KV heads of {layer.head_dim} dimensions"
        raise _other_models(f"models with other heads in layers with a window of {kind.window}", sizes)
    return kind._replace(kv_from=of_kind[-1], num_kv_heads=layer.num_kv_heads)


def _other_models(expected: str, got: object) -> ConfigError:
    fix = 'the assistant of the served model as "model", or none where the model itself has a layer that drafts'
    return ConfigError(f"the method mtp takes an assistant that drafts for {expected}", got=got, fix=fix)
