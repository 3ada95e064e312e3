"""Weights given as arrays in memory, checked against the model's or against those that are served."""

from collections.abc import Mapping
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jinfercept.errors import ModelError
from jinfercept.models.adapted import without_adapters
from jinfercept.models.joined_weights import is_joined, separate, separate_layer, serve, serve_layer
from jinfercept.models.mesh import EVERYWHERE, ModelMesh, mesh_of
from jinfercept.models.model import Model, abstract_params, tied, untied
from jinfercept.models.named_weights import KEPT, by_name, check_leaf, dotted, made
from jinfercept.models.protocol import CutModel, Params, ServedModel, Weights
from jinfercept.models.quantized import is_quantized, weights_of
from jinfercept.models.sharding import fit, partition_spec, partition_specs
from jinfercept.models.stored_weights import LazyWeight

_LAYOUT = "Params(embed, layers, head) of models/protocol.py"
_NUMBERS = (np.number, np.bool)


def initial_params(model: ServedModel, params: Params, mesh: ModelMesh) -> Params:
    """The weights that a model starts with, as JAX arrays in their own dtypes, on their devices.

    JAX's arrays that lie where they are wanted are not copied. The head of tied embeddings is taken from the embedding. All
    layers of a custom model are alike. Raises `ModelError` if a weight is missing, is not the model's, or has another shape;
    the error names it; and for quantised weights on several devices.
    """
    num_layers = model.config.num_layers
    params = _complete(model, params)
    if (given := len(params.layers)) != num_layers:
        raise ModelError("params have another number of layers than the model", got=given, fix=f"give {num_layers}")
    if not isinstance(model, Model):
        _check(params, params._replace(layers=params.layers[:1] * num_layers))
        return _on_devices(model, params, mesh)
    params = made(untied(model.config, _fitting(model, params, mesh.size)))
    return tied(model.config, serve(_on_devices(model, params, mesh)))


@final
class Replacement:
    """Weights that replace the served ones, in the dtypes of those; checked.

    Args:
        model: the served model; the head of tied embeddings is taken from the embedding.
        params: any arrays, numpy's included, `KEPT` in place of what stays as it is, `LazyWeight`s. None of them is served
            itself: the caller may donate them.
        shapes: of the served weights, as `shapes_of`.
        ties: of the served weights, as `ties_of`; for `KEPT`.

    Raises:
        ModelError: a weight is missing, is not the model's, or has another shape; the error names it. Or the served weights are
            quantised: no others can replace them.
    """

    def __init__(
        self, model: ServedModel, params: Params, shapes: Params, ties: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        if quantised := next((weight for weight in weights_of(shapes) if is_quantized(weight)), None):
            raise ModelError(
                "quantised weights cannot be replaced", got=str(quantised.packing), fix="start with quantization=none"
            )
        params = _complete(model, params)
        self._mesh = mesh_of(weights_of(shapes.embed)[0])
        self._model = model if isinstance(model, Model) else None
        if isinstance(model, Model):
            params, shapes = (untied(model.config, tree) for tree in (_fitting(model, params, self._mesh.size), shapes))
        else:
            params = _with_ties(params, ties)
            _check(params, shapes)
        self._blocks, self._shapes = blocks_of(params), blocks_of(shapes)
        self._one_array = {
            name: twin
            for name, leaf in params.head.items()
            for twin, first in params.embed.items()
            if leaf is first and leaf is not KEPT and shapes.head[name] == shapes.embed[twin]
        }
        if self._one_array:  # of a model of one's own with tied embeddings
            for blocks in (self._blocks, self._shapes):
                blocks[-1] = {name: leaf for name, leaf in blocks[-1].items() if name not in self._one_array}

    @property
    def is_partial(self) -> bool:
        """Whether some of the served weights stay as they are."""
        return any(leaf is KEPT for leaf in jax.tree.leaves(self._blocks))

    def on_host(self, served: "Params | Replacement | None" = None) -> Self:
        """The same with copies of the new weights in the host's memory: the caller may donate them, and free the device.
        `served`: the weights of which some stay, if this is partial."""
        there = copy(self)
        if self.is_partial:
            assert served is not None
            blocks = served._blocks if isinstance(served, Replacement) else self._old(blocks_of(served))
            there._blocks = [
                (stays := self._staying(new, old)) | self._filled(new, old, stays)
                for new, old in zip(self._blocks, blocks, strict=True)
            ]
        there._blocks = [
            jax.tree.map(lambda leaf: np.array(leaf.make() if isinstance(leaf, LazyWeight) else leaf), block)
            for block in there._blocks
        ]
        return there

    def write(self, old: list[Weights] | None, *, owned: bool = True) -> Params:
        """The new weights, block by block. The first call compiles.

        Args:
            old: blocks of the served weights, without adapters; None: they are gone, and none stay. The list is emptied before
                the first of them is overwritten: if this raises, what is in the list is whole.
            owned: no caller holds the arrays of the old weights, so the new ones are written into these; else beside them.
        """
        blocks: list[Weights | None] = [None] * len(self._blocks)
        if old is not None:
            blocks[:] = self._old(old)
        owners = {place: index for index, block in enumerate(blocks) for place in _buffers(block)}
        origins = [{owners[place] for place in _buffers(block) if place in owners} for block in self._blocks]
        stay = owned
        if any(indices - {index} for index, indices in enumerate(origins)):  # to another block
            owned = False
            if stay and old is not None:
                old.clear()  # an old block is dropped when the new one is there
        news, gone = list[Weights](), set[int]()
        for index, (new, shapes) in enumerate(zip(self._blocks, self._shapes, strict=True)):
            block, blocks[index] = blocks[index], None
            stays = self._staying(new, block) if stay and block is not None else {}
            if block is not None:
                new = self._filled(new, block, stays)
                block = {name: leaf for name, leaf in block.items() if name not in stays}
            places = _buffers(block)
            reused = block if owned and not places & (gone | _buffers(new)) else None
            gone |= places
            shapes = {name: leaf for name, leaf in shapes.items() if name not in stays}
            stays |= self._block(new, shapes, reused, [] if old is None else old)
            news.append(stays)
        embed, *layers, head = jax.block_until_ready(news)
        head |= {name: embed[twin] for name, twin in self._one_array.items()}
        params = Params(embed, tuple(layers), head)
        return params if self._model is None else tied(self._model.config, params)

    def _block(self, new: Weights, shapes: Weights, reused: Weights | None, old: list[Weights]) -> Weights:
        # `old` is emptied before the first array is overwritten, in the memory of what is `reused`
        if not new:
            return {}
        placed = self._placed(new, shapes)
        if reused:
            old.clear()
        return self._written(reused, placed, shapes)

    def _old(self, blocks: list[Weights]) -> list[Weights]:
        pairs = zip(blocks, self._shapes, strict=True)
        return [{name: leaf for name, leaf in block.items() if name in shapes} for block, shapes in pairs]

    @staticmethod
    def _staying(new: Weights, old: Weights) -> Weights:
        names = [name for name, leaf in new.items() if all(part is KEPT for part in jax.tree.leaves(leaf))]
        return {name: old[name] for name in names if name in old}

    def _filled(self, new: Weights, old: Weights, stays: Weights) -> Weights:
        new = {name: leaf for name, leaf in new.items() if name not in stays}
        if all(leaf is not KEPT for leaf in jax.tree.leaves(new)):
            return new
        rest = {name: leaf for name, leaf in old.items() if name not in stays}
        apart = rest if self._model is None else separate_layer(rest)
        return jax.tree.map(
            lambda leaf, served: served if leaf is KEPT else leaf, new, {name: apart[name] for name in new}
        )

    def _placed(self, block: Weights, shapes: Weights) -> Weights:
        block = made(block)
        if self._model is None:
            return jax.device_put(block, _homes(shapes))
        if self._mesh.size == 1:
            return jax.device_put(block, self._mesh.sharding())
        specs = {name: self._mesh.sharding(partition_spec(name, weight)) for name, weight in block.items()}
        return serve_layer(jax.device_put(block, specs))

    def _written(self, old: Weights | None, placed: Weights, shapes: Weights) -> Weights:
        dtypes = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(shapes))
        on_one = self._model is not None and self._mesh.size == 1
        written = _write(old, placed, dtypes, as_served=on_one)
        return written if self._model is None or on_one else jax.device_put(written, _homes(shapes))


def _homes(shapes: Weights) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


@partial(jax.jit, static_argnames=("dtypes", "as_served"), donate_argnums=0, keep_unused=True)
def _write(old: Weights | None, new: Weights, dtypes: tuple[str, ...], *, as_served: bool) -> Weights:
    # in the memory of the old weights, never in that of the new
    leaves, tree = jax.tree.flatten(serve_layer(new) if as_served else new)
    return jax.tree.unflatten(tree, [jnp.copy(leaf).astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)])


def shapes_of(params: Params) -> Params:
    """The shapes of weights, with their dtypes and placements."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def ties_of(params: Params) -> dict[str, str]:
    """Names of the head's weights that are the embedding's arrays, and their names there."""

    def places(leaf: Any) -> set[int]:
        return _buffers({"": leaf}) or {id(leaf)}

    ours = [(name, places(leaf)) for name, leaf in params.embed.items()]
    return {name: twin for name, leaf in params.head.items() for twin, own in ours if own == places(leaf)}


def blocks_of(params: Params) -> list[Weights]:
    """The embedding, the layers and the head."""
    return [params.embed, *params.layers, params.head]


def _with_ties(params: Params, ties: Mapping[str, str]) -> Params:
    embed, head = dict(params.embed), dict(params.head)
    for name, twin in ties.items():
        if head.get(name) is KEPT and twin in embed:
            head[name] = embed[twin]
        elif embed.get(twin) is KEPT and name in head:
            embed[twin] = head[name]
    return params._replace(embed=embed, head=head)


def _buffers(weights: Weights | None) -> set[int]:
    # where a block's arrays lie in the memories of their devices
    arrays = [leaf for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)]
    alone = [array for array in arrays if len(array.sharding.device_set) == 1]
    alone += [
        shard.data for array in arrays if len(array.sharding.device_set) > 1 for shard in array.addressable_shards
    ]
    return {array.unsafe_buffer_pointer() for array in alone}


def _fitting(model: Model, params: Params, num_devices: int) -> Params:
    if num_devices > 1 and any(map(is_quantized, weights_of(params))):
        raise ModelError(
            "quantised weights given as arrays need a single device",
            got=f"{num_devices} devices",
            fix="name the checkpoint instead",
        )
    # weights are in a checkpoint's shapes or those that so many devices cut, apart or joined as `load` returns them
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
    fits = [shape == places.get(name) for name, shape in _shapes(params).items() if shape is not None]
    _check(params, served if all(fits) else stored)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, target: _fit(path[-1].key, leaf, target.shape), params, served
    )


def _fit(name: str, leaf: Any, shape: tuple[int, ...]) -> Any:
    if leaf is KEPT or leaf.shape == shape:
        return leaf
    return LazyWeight(shape, lambda: fit(name, made(leaf), shape))  # made when it is written


def _on_devices(model: ServedModel, params: Params, mesh: ModelMesh) -> Params:
    specs = EVERYWHERE
    if mesh.size > 1:
        specs = model.partition_specs() if isinstance(model, CutModel) else partition_specs(params)
    try:
        placed = jax.device_put(params, jax.tree.map(mesh.sharding, specs))
    except ValueError as error:
        raise ModelError(
            "partition_specs() do not cut the weights", got=str(error)[:500], fix="cut axes that divide evenly"
        ) from error
    copies = dict[int, jax.Array]()

    def own(given: Any, array: jax.Array) -> jax.Array:
        # a copy of an array in NumPy's memory, which the caller may write to, the same one for tied weights
        start = given.ctypes.data if isinstance(given, np.ndarray) else 0
        if start and any(start <= place < start + given.nbytes for place in _buffers({"": array})):
            return copies.setdefault(id(given), jax.device_put(array, array.sharding, may_alias=False))
        return array

    return jax.block_until_ready(jax.tree.map(own, params, placed))


def _complete(model: ServedModel, params: Params) -> Params:
    if not isinstance(params, Params) or not params.embed:
        raise ModelError("params must be Params", got=type(params).__name__, fix=f"give {_LAYOUT}")
    kinds = zip(params, (Mapping, tuple | list, Mapping), strict=True)
    if not all(isinstance(part, kind) for part, kind in kinds):
        got = ", ".join(f"{name} {type(part).__name__}" for name, part in params._asdict().items())
        raise ModelError(
            "the parts of Params must be a dict, a tuple and a dict of arrays", got=got, fix=f"give {_LAYOUT}"
        )
    params = without_adapters(params._replace(layers=tuple(params.layers)))  # of an engine with adapters
    for path, weight in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        kinds = (np.floating,) if isinstance(model, Model) and not is_quantized(weight) else _NUMBERS
        for leaf in jax.tree.leaves(weight):
            if leaf is not KEPT and not isinstance(leaf, LazyWeight):
                check_leaf(dotted(path), leaf, kinds)
    return tied(model.config, params) if isinstance(model, Model) and "embedding" in params.embed else params


def _shapes(params: Params) -> dict[str, Any]:
    return {name: getattr(leaf, "shape", None) for name, leaf in by_name(params).items()}


def _check(params: Params, expected: Params) -> None:
    new, old = by_name(params), by_name(expected)
    for name in sorted(old.keys() ^ new.keys()):
        problem = "is missing" if name in old else "is none of the model's"
        raise ModelError(
            f"weight {name} {problem}", got=f"{len(new)} weights for {len(old)}", fix="give the same structure"
        )
    for name, leaf in old.items():
        shape, expected_shape = getattr(new[name], "shape", None), getattr(leaf, "shape", None)
        if new[name] is KEPT:
            continue
        if expected_shape is None:
            raise ModelError(f"weight {name} is not an array", got=type(leaf).__name__, fix="give an array")
        if shape != expected_shape:
            got = type(new[name]).__name__ if shape is None else shape
            raise ModelError(f"weight {name} has another shape", got=got, fix=f"{expected_shape}")
