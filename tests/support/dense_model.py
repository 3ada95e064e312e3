"""A whole model over one sequence with plain causal attention: what `models` must agree with golden files under."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jinfercept.models.model import Model, Params, Weights
from jinfercept.models.quantized import is_quantized


def dense_attend(
    q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], kv: None
) -> tuple[Float[Array, "T H D"], None]:
    """Every token attends to itself and all before it; nothing is cached."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32) / head_dim**0.5
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(q.shape), kv


@jax.jit
def dense(params: Params) -> Params:
    """The parameters with arrays in place of quantised weights."""
    return jax.tree.map(lambda weight: weight.dense() if is_quantized(weight) else weight, params, is_leaf=is_quantized)


def logits(model: Model, params: Params, tokens: Int[Array | np.ndarray, "T"]) -> Float32[Array, "T V"]:
    """Logits after every token of one sequence."""
    x = model.embed(params.embed, jnp.asarray(tokens))
    for layer in params.layers:
        x = _layer(model, layer, x)
    return jax.jit(model.head)(params.head, x)


@partial(jax.jit, static_argnums=0)
def _layer(model: Model, params: Weights, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
    return model.layer(params, x, jnp.arange(x.shape[0]), None, dense_attend)[0]
