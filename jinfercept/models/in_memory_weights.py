"""Weights given as arrays in memory, checked against the model's or against those that are served."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.errors import ModelError
from jinfercept.models.joined_weights import is_joined, serve
from jinfercept.models.model import Model, abstract_params, tied, untied
from jinfercept.models.protocol import Params, ServedModel

_LAYOUT = "Params(embed, layers, head) of models/protocol.py"


def initial_params(model: ServedModel, params: Params) -> Params:
    """The weights that a model starts with, as JAX arrays in their own dtypes.

    Args:
        model: if its embeddings are tied, the head's are taken from the embedding.
        params: any arrays, numpy's included. For a custom model, all layers have to be alike; nothing else is checked.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it.
    """
    num_layers = model.config.num_layers
    params = _complete(model, params)
    if len(params.layers) != num_layers:
        got = f"{len(params.layers)} layers"
        raise ModelError("params have another number of layers than the model", got=got, fix=f"give {num_layers}")
    if isinstance(model, Model):
        _check(params, _expected(model, params, jnp.float32))
        return tied(model.config, serve(jax.tree.map(jnp.asarray, untied(model.config, params))))
    _check(params, params._replace(layers=params.layers[:1] * num_layers))
    return jax.tree.map(jnp.asarray, params)


def replacement_params(model: ServedModel, params: Params, present: Params) -> Params:
    """Weights that replace the served ones, in the dtypes of those.

    Args:
        model: the served model; if its embeddings are tied, the head's are taken from the embedding.
        params: the new weights: any arrays, numpy's included.
        present: the served weights.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it.
    """
    params = _complete(model, params)
    if isinstance(model, Model):
        leaf = jax.tree.leaves(present.embed)[0]
        expected = _expected(model, params, leaf.dtype)
        _check(params, expected)
        return serve(jax.device_put(_cast(params, expected), leaf.sharding))
    _check(params, present)
    return _cast(params, present)


def _expected(model: Model, params: Params, dtype: DTypeLike) -> Params:
    """The shapes that weights should have: apart as in checkpoints, or joined as `load` returns them."""
    return abstract_params(model.config, dtype, joined=bool(params.layers) and is_joined(params.layers[0]))


def _cast(params: Params, like: Params) -> Params:
    """The weights in the dtypes of others."""
    return jax.tree.map(
        lambda leaf, other: leaf if leaf.dtype == other.dtype else leaf.astype(other.dtype), params, like
    )


def _complete(model: ServedModel, params: Params) -> Params:
    """The weights with tied embeddings in the head. Raises `ModelError` for anything but `Params`."""
    if not isinstance(params, Params) or not params.embed:
        raise ModelError("weights are Params", got=type(params).__name__, fix=f"give {_LAYOUT}")
    if not isinstance(params.embed, Mapping) or not isinstance(params.head, Mapping):
        got = f"embed {type(params.embed).__name__}, head {type(params.head).__name__}"
        raise ModelError("the parts of Params are dicts of arrays", got=got, fix=f"give {_LAYOUT}")
    if not isinstance(params.layers, tuple | list):
        raise ModelError("layers are a tuple", got=type(params.layers).__name__, fix=f"give {_LAYOUT}")
    params = params._replace(layers=tuple(params.layers))
    return tied(model.config, params) if isinstance(model, Model) and "embedding" in params.embed else params


def _check(params: Params, expected: Params) -> None:
    """Raise `ModelError` unless both have the same names and shapes."""
    new, old = _by_name(params), _by_name(expected)
    for name in sorted(old.keys() ^ new.keys()):
        what = "is missing" if name in old else "is none of the model's"
        raise ModelError(
            f"weight {name} {what}", got=f"{len(new)} weights for {len(old)}", fix="give the same structure"
        )
    for name, leaf in old.items():
        shape, wanted = getattr(new[name], "shape", None), getattr(leaf, "shape", None)
        if wanted is None:
            raise ModelError(f"weight {name} is no array", got=type(leaf).__name__, fix="give an array")
        if shape != wanted:
            got = type(new[name]).__name__ if shape is None else shape
            raise ModelError(f"weight {name} has another shape", got=got, fix=f"{wanted}")


def _by_name(params: Params) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
