"""A whole model over one sequence with plain causal attention: what `models` must agree with golden files under."""

from collections.abc import Hashable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jinfercept.models.protocol import MixedModel, Params, RecurrentModel, ServedModel, Weights
from jinfercept.models.quantized import is_quantized
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.layouts.states import StateRows
from jinfercept.runner.steps import kinds_of

type KV = tuple[Float[Array, "T K D"], Float[Array, "T K D"]] | None


def dense_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"] | None,
    v: Float[Array, "T K D"] | None,
    kv: KV,
    scoring: Scoring = PLAIN,
) -> tuple[Float[Array, "T H D"], KV]:
    """Every token attends to itself and those before it, as `scoring` says, by another layer's keys and values if need be."""
    if k is None or v is None:
        assert kv is not None
        k, v = kv
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32) / head_dim**0.5
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    if scoring.window is not None:
        causal &= ~jnp.tril(jnp.ones((num_tokens, num_tokens), bool), -scoring.window)
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    scores = jnp.where(causal[None, None], scores, -jnp.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.reshape(num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(q.shape), (k, v)


@jax.jit
def dense(params: Params) -> Params:
    """The parameters with arrays in place of quantised weights."""
    return jax.tree.map(lambda weight: weight.dense() if is_quantized(weight) else weight, params, is_leaf=is_quantized)


def logits(model: ServedModel, params: Params, tokens: Int[Array | np.ndarray, "T"]) -> Float32[Array, "T V"]:
    """Logits after every token of one sequence."""
    return jax.jit(model.head)(params.head, hidden(model, params, tokens))


def hidden(model: ServedModel, params: Params, tokens: Int[Array | np.ndarray, "T"]) -> Float[Array, "T E"]:
    """The last layer's output for every token of one sequence."""
    x = model.embed(params.embed, jnp.asarray(tokens), jnp.arange(len(tokens)))
    kinds = kinds_of(model) or (None,) * len(params.layers)
    written = list[KV]()
    for kind, layer in zip(kinds, params.layers, strict=True):
        source = getattr(kind, "kv_from", None) if getattr(kind, "has_mixer", True) else None
        x, kv = _layer(model, kind, layer, x, None if source is None else written[source])
        written.append(kv)
    return x


@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    model: ServedModel, kind: Hashable, params: Weights, x: Float[Array, "T E"], kv: KV
) -> tuple[Float[Array, "T E"], KV]:
    layer = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
    positions = jnp.arange(x.shape[0])
    if kind is not None and isinstance(model, RecurrentModel) and (arrays := model.layer_states(kind)):
        states = tuple(
            jnp.ones((2, *array.shape), array.dtype or x.dtype) for array in arrays
        )  # a row begins with zeros
        length = jnp.array([len(x)])
        rows = StateRows(
            *(jnp.array([1]), jnp.array([1]), jnp.array([0]), jnp.array([0, len(x)]), length),
            (length[0] == 1).astype(jnp.int32),
        )
        return layer(params, x, positions, states, rows)[0], None  # pyright: ignore[reportArgumentType]
    return layer(params, x, positions, kv, dense_attend)
