"""Weights given as arrays in memory, checked against the model's or against those that are served."""

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.errors import ModelError
from jinfercept.models.joined_weights import is_joined, separate, serve, serve_layer
from jinfercept.models.mesh import ModelMesh, mesh_of
from jinfercept.models.model import Model, abstract_params, tied, untied
from jinfercept.models.protocol import CutModel, Params, ServedModel, Weights
from jinfercept.models.quantized import is_quantized, weights_of
from jinfercept.models.sharding import fit, partition_spec, partition_specs

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


@final
class Replacement:
    """Weights that replace the served ones, in the dtypes of those; checked.

    Args:
        model: the served model; if its embeddings are tied, the head's are taken from the embedding.
        params: the new weights: any arrays, numpy's included. None of them is served itself: the caller may donate them.
        shapes: of the served weights, as `shapes_of`.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it. Or the served weights are
            quantised: no others can replace them.
    """

    def __init__(self, model: ServedModel, params: Params, shapes: Params) -> None:
        params = _complete(model, params)
        if quantised := next((weight for weight in weights_of(shapes) if is_quantized(weight)), None):
            raise ModelError(
                "quantised weights cannot be replaced", got=str(quantised.packing), fix="start with quantization=none"
            )
        self._mesh = mesh_of(weights_of(shapes.embed)[0])
        self._model = model if isinstance(model, Model) else None
        if isinstance(model, Model):
            params, shapes = (untied(model.config, it) for it in (_fitting(model, params, self._mesh.size), shapes))
        else:
            _check(params, shapes)
        self._blocks, self._shapes = blocks_of(params), blocks_of(shapes)
        self._one_array = {
            name: other
            for name, leaf in params.head.items()
            for other, first in params.embed.items()
            if leaf is first and shapes.head[name] == shapes.embed[other]
        }
        if self._one_array:  # of a model of one's own with tied embeddings
            for blocks in (self._blocks, self._shapes):
                blocks[-1] = {name: leaf for name, leaf in blocks[-1].items() if name not in self._one_array}

    def on_host(self) -> Self:
        """The same with copies of the new weights in the host's memory: the caller may donate them, and free the device."""
        there = copy(self)
        there._blocks = [jax.tree.map(np.array, block) for block in self._blocks]
        return there

    def write(self, old: list[Weights] | None, *, owned: bool = True) -> Params:
        """The new weights, block by block. The first call compiles.

        Args:
            old: blocks of the served weights, without adapters; the list is emptied. None: they are gone.
            owned: no caller holds the arrays of the old weights: the new weights are written into these arrays.
                Else an old block is dropped when the new one is there.
        """
        blocks: list[Weights | None] = [None] * len(self._blocks)
        if old is not None:
            blocks[:] = [
                {name: leaf for name, leaf in block.items() if name in shapes} for block, shapes in self._pairs(old)
            ]
            old.clear()
        owners = {place: index for index, block in enumerate(blocks) for place in _buffers(block)}
        given = [{owners[place] for place in _buffers(block) if place in owners} for block in self._blocks]
        if any(indices - {index} for index, indices in enumerate(given)):  # to another block
            owned = False
        news, gone = list[Weights](), set[int]()
        for index, (new, shapes) in enumerate(self._pairs(self._blocks)):
            block, blocks[index] = blocks[index], None
            places = _buffers(block)
            reused = block if owned and not given[index] and not places & gone else None
            gone |= places
            news.append(self._written(reused, new, shapes))
        embed, *layers, head = jax.block_until_ready(news)
        head |= {name: embed[other] for name, other in self._one_array.items()}
        params = Params(embed, tuple(layers), head)
        return params if self._model is None else tied(self._model.config, params)

    def _pairs(self, blocks: list[Weights]) -> list[tuple[Weights, Weights]]:
        return list(zip(blocks, self._shapes, strict=True))

    def _written(self, old: Weights | None, given: Weights, shapes: Weights) -> Weights:
        homes = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        dtypes = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(shapes))
        if self._model is None:
            return _write(old, jax.device_put(given, homes), dtypes, as_served=False)
        if self._mesh.size == 1:
            return _write(old, jax.device_put(given, self._mesh.sharding()), dtypes, as_served=True)
        specs = {name: self._mesh.sharding(partition_spec(name, weight)) for name, weight in given.items()}
        served = serve_layer(jax.device_put(given, specs))
        return jax.device_put(_write(old, served, dtypes, as_served=False), homes)


@partial(jax.jit, static_argnames=("dtypes", "as_served"), donate_argnums=0, keep_unused=True)
def _write(old: Weights | None, given: Weights, dtypes: tuple[str, ...], *, as_served: bool) -> Weights:
    """The given weights in these dtypes, in the memory of the old ones, never in their own."""
    leaves, tree = jax.tree.flatten(serve_layer(given) if as_served else given)
    return jax.tree.unflatten(tree, [jnp.copy(leaf).astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])


def shapes_of(params: Params) -> Params:
    """The shapes of weights, with their dtypes and placements."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def blocks_of(params: Params) -> list[Weights]:
    """The embedding, the layers and the head."""
    return [params.embed, *params.layers, params.head]


def _buffers(weights: Weights | None) -> set[int]:
    """Where the arrays of a block lie in the memories of their devices."""
    arrays = [leaf for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)]
    alone = [array for array in arrays if len(array.sharding.device_set) == 1]
    alone += [
        shard.data for array in arrays if len(array.sharding.device_set) > 1 for shard in array.addressable_shards
    ]
    return {array.unsafe_buffer_pointer() for array in alone}


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
