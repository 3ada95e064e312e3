"""A model's forward pass over one sequence, as trainers write it: no pages, no batch, differentiable."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.cpu_kernels.ordered_attention import KEYS, visible, whole_attention
from jinfercept.errors import ConfigError
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.models.adapted import without_adapters
from jinfercept.models.joined_weights import join_layer, separate_layer
from jinfercept.models.model import Model
from jinfercept.models.protocol import MixedModel, Params, ServedModel, states_of
from jinfercept.runner.steps import kinds_of


def forward_logits(
    model: ServedModel, params: Params, tokens: Int[Array, "T"], *, fill: int = KEYS
) -> Float[Array, "T V"]:
    """Logits after every token of one sequence. It can be traced and differentiated by `params`.

    In float32 on a CPU they are those that an engine with `batch_invariant` has, bit for bit: the sequence is filled up to a
    multiple of 256 tokens, and XLA fuses nothing across layers; everything else is plain `jax.numpy`.

    Args:
        model, params: `llm.model` with its weights, joined or apart, or a `Model` with a trainer's. Adapters add nothing.
        fill: the sequence is filled up to a multiple of so many tokens; 1: it is not.

    Raises:
        ConfigError: the model has recurrent layers.
    """
    if states_of(model):
        raise ConfigError("recurrent layers are not supported", got=model.config.family, fix="another model")
    params = jax.tree.map(jnp.asarray, without_adapters(params))
    if isinstance(model, Model):
        params = params._replace(layers=tuple(map(join_layer if model.joined else separate_layer, params.layers)))
    num_tokens = len(tokens)
    tokens = jnp.pad(jnp.asarray(tokens), (0, -num_tokens % fill))
    positions = jnp.arange(len(tokens))

    def attend(
        q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], kv: None, scoring: Scoring = PLAIN
    ) -> tuple[Float[Array, "T H D"], None]:
        return whole_attention(q, k, v, visible(positions, positions, scoring), scoring), kv

    x = model.embed(params.embed, tokens, positions)
    kinds = kinds_of(model) or (None,) * len(params.layers)
    for kind, weights in zip(kinds, params.layers, strict=True):
        layer: Any = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
        x, _ = layer(weights, jax.lax.optimization_barrier(x), positions, None, attend)
        x = jax.lax.optimization_barrier(x)  # as if each layer was compiled by itself
    return model.head(params.head, x)[:num_tokens]


def forward_logprobs(model: ServedModel, params: Params, tokens: Int[Array, "T"]) -> Float[Array, "predictions"]:
    """Log probabilities of `tokens[1:]`, each behind those before it: `forward_logits`, and of each row its logit less the
    logarithm of the sum. `jax.nn.log_softmax` of the same logits differs from it in the last bits."""
    return next_logprobs(forward_logits(model, params, tokens), tokens)


def next_logprobs(logits: Float[Array, "T V"], tokens: Int[Array, "T"]) -> Float[Array, "predictions"]:
    """Log probabilities of `tokens[1:]` by the logits after every token, in the order of the engine's sums."""
    count = len(logits)
    logits = jnp.pad(logits, ((0, -count % KEYS), (0, 0)))  # few rows are summed in another order
    targets = jnp.pad(jnp.asarray(tokens)[1:], (0, len(logits) - count + 1))
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return (chosen - jax.nn.logsumexp(logits, axis=-1))[: count - 1]
