"""Weights given as arrays in memory, checked against the model's or against those that are served."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jinfercept.errors import ModelError
from jinfercept.models.joined_weights import is_joined, separate, serve
from jinfercept.models.mesh import ModelMesh, mesh_of
from jinfercept.models.model import Model, abstract_params, tied, untied
from jinfercept.models.protocol import CutModel, Params, ServedModel, Weights
from jinfercept.models.quantized import is_quantized, weights_of
from jinfercept.models.sharding import fit, partition_specs

_LAYOUT = "Params(embed, layers, head) of models/protocol.py"
_NUMBERS = (np.number, np.bool)


def initial_params(model: ServedModel, params: Params, mesh: ModelMesh) -> Params:
    """The weights that a model starts with, as JAX arrays in their own dtypes, on their devices.

    Args:
        model: if its embeddings are tied, the head's are taken from the embedding.
        params: any arrays, numpy's included; what lies where it is wanted is not copied. For a custom model, all layers have to
            be alike; nothing else is checked.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it. Or there are quantised
            weights for several devices.
    """
    num_layers = model.config.num_layers
    params = _complete(model, params)
    if len(params.layers) != num_layers:
        got = f"{len(params.layers)} layers"
        raise ModelError("params have another number of layers than the model", got=got, fix=f"give {num_layers}")
    if isinstance(model, Model):
        params = _fitting(model, params, mesh.size)
        return tied(model.config, serve(_on_devices(model, untied(model.config, params), mesh)))
    _check(params, params._replace(layers=params.layers[:1] * num_layers))
    return _on_devices(model, params, mesh)


def replacement_params(model: ServedModel, params: Params, present: Params) -> Params:
    """Weights that replace the served ones, in the dtypes of those.

    Args:
        model: the served model; if its embeddings are tied, the head's are taken from the embedding.
        params: the new weights: any arrays, numpy's included. None of them is served itself: the caller may donate them.
        present: the served weights.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it. Or the served weights are
            quantised: no others can replace them.
    """
    params = _complete(model, params)
    if quantised := next((weight for weight in weights_of(present) if is_quantized(weight)), None):
        raise ModelError(
            "quantised weights cannot be replaced", got=str(quantised.packing), fix="start with quantization=none"
        )
    if isinstance(model, Model):
        leaf = weights_of(present.embed)[0]
        fitting = _cast(_fitting(model, params, mesh_of(leaf).size), leaf.dtype)
        served = serve(_on_devices(model, untied(model.config, fitting), mesh_of(leaf)))
        layers = tuple(map(_copied, served.layers, params.layers))
        return tied(
            model.config, Params(_copied(served.embed, params.embed), layers, _copied(served.head, params.head))
        )
    _check(params, present)
    cast = jax.tree.map(lambda leaf, other: _cast(leaf, other.dtype), params, present)
    placed = _on_devices(model, cast, mesh_of(jax.tree.leaves(present.embed)[0]))
    return jax.tree.map(_copy, placed, params)


def _fitting(model: Model, params: Params, num_devices: int) -> Params:
    """The weights in the shapes that so many devices cut, of those in a checkpoint's shapes or in these: apart, or joined as
    `load` returns them. Raises `ModelError` as `_check`."""
    if num_devices > 1 and any(map(is_quantized, weights_of(params))):
        raise ModelError(
            "quantised weights in memory are for one device",
            got=f"{num_devices} devices",
            fix="name the checkpoint instead",
        )
    joined = any(map(is_joined, params.layers))
    if num_devices == 1:
        _check(params, abstract_params(model.checkpoint_config, jnp.float32, joined=joined))
        return params
    if joined and _shapes(params) == _shapes(abstract_params(model.config, jnp.float32, num_devices=num_devices)):
        return params
    params = separate(params)
    stored = abstract_params(model.checkpoint_config, jnp.float32, joined=False)
    served = abstract_params(model.config, jnp.float32, joined=False, num_devices=num_devices)
    places = _shapes(served)
    fits = [shape == places.get(name) for name, shape in _shapes(params).items()]
    _check(params, served if all(fits) else stored)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, wanted: fit(path[-1].key, leaf, wanted.shape), params, served
    )


def _on_devices(model: ServedModel, params: Params, mesh: ModelMesh) -> Params:
    """The weights as JAX arrays on the devices that serve them. Raises `ModelError` if these cannot cut them so."""
    if mesh.size == 1:
        return jax.device_put(params, mesh.sharding())
    specs = model.partition_specs() if isinstance(model, CutModel) else partition_specs(params)
    try:
        return jax.device_put(params, jax.tree.map(mesh.sharding, specs))
    except ValueError as error:
        raise ModelError(
            "partition_specs() do not cut the weights", got=str(error)[:500], fix="cut axes that divide evenly"
        ) from error


def _cast[T](params: T, dtype: DTypeLike) -> T:
    """The weights in this dtype."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


def _copied(served: Weights, given: Weights) -> Weights:
    """A block's weights, with copies of those that may be the arrays given for them."""
    return {name: _copy(leaf, given[name]) if name in given else leaf for name, leaf in served.items()}


def _copy(leaf: jax.Array, given: Any) -> jax.Array:
    """A copy of a weight, beside it, if it may be the array given for it; else the weight."""
    may_be_given = isinstance(given, jax.Array) and given.dtype == leaf.dtype
    return jax.device_put(leaf, leaf.sharding, may_alias=False) if may_be_given else leaf


def _complete(model: ServedModel, params: Params) -> Params:
    """The weights with tied embeddings in the head. Raises `ModelError` for anything but `Params` of arrays that exist."""
    if not isinstance(params, Params) or not params.embed:
        raise ModelError("weights are Params", got=type(params).__name__, fix=f"give {_LAYOUT}")
    if not isinstance(params.embed, Mapping) or not isinstance(params.head, Mapping):
        got = f"embed {type(params.embed).__name__}, head {type(params.head).__name__}"
        raise ModelError("the parts of Params are dicts of arrays", got=got, fix=f"give {_LAYOUT}")
    if not isinstance(params.layers, tuple | list):
        raise ModelError("layers are a tuple", got=type(params.layers).__name__, fix=f"give {_LAYOUT}")
    params = params._replace(layers=tuple(params.layers))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        _check_leaf(
            jax.tree_util.keystr(path), leaf, (np.floating, np.integer) if isinstance(model, Model) else _NUMBERS
        )
    return tied(model.config, params) if isinstance(model, Model) and "embedding" in params.embed else params


def _check_leaf(name: str, leaf: Any, kinds: tuple[type, ...]) -> None:
    """Raise `ModelError` unless a weight is an array of these kinds of numbers that exists, without a mask."""
    fix = "give a numpy or JAX array of numbers"
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        raise ModelError(f"weight {name} is no array", got=type(leaf).__name__, fix=fix)
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
        raise ModelError(f"weight {name} has none of a weight's dtypes", got=leaf.dtype, fix=fix)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ModelError(
            f"weight {name} does not exist", got="an array that was deleted or donated", fix="give the new one"
        )


def _shapes(params: Params) -> dict[str, Any]:
    return {name: getattr(leaf, "shape", None) for name, leaf in _by_name(params).items()}


def _check(params: Params, expected: Params) -> None:
    """Raise `ModelError` unless both have the same names and shapes."""
    new, old = _by_name(params), _by_name(expected)
    for name in sorted(old.keys() ^ new.keys()):
        problem = "is missing" if name in old else "is none of the model's"
        raise ModelError(
            f"weight {name} {problem}", got=f"{len(new)} weights for {len(old)}", fix="give the same structure"
        )
    for name, leaf in old.items():
        shape, wanted = getattr(new[name], "shape", None), getattr(leaf, "shape", None)
        if wanted is None:
            raise ModelError(f"weight {name} is no array", got=type(leaf).__name__, fix="give an array")
        if shape != wanted:
            got = type(new[name]).__name__ if shape is None else shape
            raise ModelError(f"weight {name} has another shape", got=got, fix=f"{wanted}")


def _by_name(params: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
