"""Weights in memory by name, as `Params`: states and modules of Flax NNX, mappings, and parts of any of these.

A name is parts with dots between them. Names are those of `Params`, as `layers.0.q`, or those that transformers has for the
model's weights, then in the shapes of its checkpoints.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Shaped

from jinfercept.errors import ModelError, nearest, shown
from jinfercept.models.checkpoint import StoredExperts, StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.hf_weights import BASES, FUSED, names_of
from jinfercept.models.joined_weights import JOINED, SIDES, separate_layer
from jinfercept.models.model import Model, abstract_params, untied
from jinfercept.models.protocol import Params, ServedModel, Weights
from jinfercept.models.quantized import is_quantized
from jinfercept.models.stored_rows import StoredRows, rows_in, shapes_with
from jinfercept.models.stored_weights import LazyWeight
from jinfercept.models.weight_files import plain_names, text_tensors


@final
class _Kept:
    def __repr__(self) -> str:
        return "KEPT"


_NARROW = ("float8_", "float6_", "float4_", "int4", "uint4", "int2", "uint2")
"""Dtypes, by the beginnings of their names, that JAX casts to no other by itself: without their scales they are no weights."""
KEPT: Final = _Kept()
"""In place of a new weight: the served one stays."""


def made(weights: Any) -> Any:
    """A tree of weights in which lazy ones are made."""
    return jax.tree.map(lambda leaf: leaf.make() if isinstance(leaf, LazyWeight) else leaf, weights)


def check_leaf(name: str, leaf: Any, kinds: tuple[type, ...]) -> None:
    """Raise `ModelError` unless a weight is an array of these kinds of numbers that exists, without a mask."""
    fix = "give a numpy or JAX array of floating-point numbers, of 16 bits or more"
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        raise ModelError(f"weight {name} is not an array", got=type(leaf).__name__, fix=fix)
    narrow = leaf.dtype.name.startswith(_NARROW)
    if narrow or not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
        raise ModelError(f"weight {name} has an unsupported dtype", got=leaf.dtype, fix=fix)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ModelError(
            f"weight {name} was deleted", got="an array that was deleted or donated", fix="give the new one"
        )


def dotted(path: Iterable[Any]) -> str:
    """A leaf's name, from its path in a JAX tree."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def by_name(weights: Any) -> dict[str, Any]:
    """The leaves of a tree by their names; quantised weights are leaves."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_quantized)[0]}


type WeightTree = Params | Mapping[Any, Any] | nnx.Module
"""`Params`, an `nnx.State`, or mappings in mappings with arrays in them. Keys are texts, numbers, or tuples of them."""
type NameFilter = str | Collection[str] | Callable[[str], bool]
"""A beginning of names, several, or a function that says of a name whether it counts."""


def params_by_name(
    model: ServedModel, weights: WeightTree, shapes: Params, names: Mapping[str, str] | None, only: NameFilter | None
) -> Params:
    """Weights as `Params`, in the sizes of a checkpoint or of the served ones, apart.

    Args:
        weights: of a module, its `nnx.Param`s.
        shapes: of the served weights; of a model of one's own they say which names there are.
        names: by names in `weights`, the names to put in their place; `*` in both is a number.
        only: names that count, as `weights` has them; all other weights are `KEPT`.

    Raises:
        ModelError: a name is none of the model's, or is there twice, or a leaf is no array; or one is missing without `only`.
    """
    chosen, unused = _chosen(_flat(weights), only), list[str]()
    if names:
        chosen, unused = _renamed(chosen, names)
    try:
        return _params(model, chosen, shapes, may_lack=only is not None)
    except ModelError as error:
        if not unused:
            raise
        fix = f"{error.fix}; `names` has {unused[0][:200]!r}, which is like no name that is given"
        raise ModelError(error.what, got=error.got, fix=fix) from None


def _params(model: ServedModel, chosen: dict[str, Any], shapes: Params, *, may_lack: bool) -> Params:
    kinds = (np.floating,) if isinstance(model, Model) else (np.number, np.bool)
    for name, leaf in chosen.items():
        if not isinstance(leaf, LazyWeight):
            check_leaf(name, leaf, kinds)
    if isinstance(model, Model):
        config = model.checkpoint_config
        shapes = untied(config, abstract_params(config, jnp.float32, joined=False))
        ours = by_name(shapes)
        if not chosen.keys() & ours.keys():
            chosen = weights_of_checkpoint(config, chosen, shapes, may_lack=may_lack)
        elif config.tie_embeddings:
            chosen.pop("head.unembed", None)
    else:
        ours = by_name(shapes)
    _check_names(chosen, ours, may_lack=may_lack)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [chosen.get(dotted(path), KEPT) for path, _ in leaves])


def arrays_by_name(weights: WeightTree, names: Mapping[str, str] | None) -> dict[str, Any]:
    """The leaves of weights by names, of which `names` replaces some. Raises `ModelError` as `params_by_name`."""
    return _renamed(_flat(weights), names)[0] if names else _flat(weights)


def _flat(weights: WeightTree) -> dict[str, Any]:
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if isinstance(weights, Params):
        weights = weights._replace(layers=tuple(map(_apart, weights.layers)))._asdict()
    if not isinstance(weights, Mapping):
        got, fix = type(weights).__name__, "give Params, an nnx.State, an nnx.Module, or a dict of arrays by name"
        raise ModelError("params must be Params, or arrays by name", got=got, fix=fix)
    flat = dict[str, Any]()
    for name, leaf in _leaves(weights, ()):
        if name in flat:
            raise ModelError("two weights have the same name", got=name[:200], fix="give each once")
        flat[name] = leaf
    if not flat:
        raise ModelError("no weights were given", got="an empty mapping", fix="give arrays by name")
    return flat


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, Mapping):
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, tuple | list):
        items = enumerate(tree)
    else:
        yield ".".join(path), tree
        return
    for key, value in items:
        yield from _leaves(value, (*path, *(map(str, key) if isinstance(key, tuple) else (str(key),))))


def _apart(layer: Weights) -> Weights:
    layer = dict(layer)
    for name, parts in (JOINED | SIDES).items():
        if name in layer:
            joined = {name: layer.pop(name)}
            shapes = jax.eval_shape(separate_layer, joined)
            for part in parts:
                layer[part] = LazyWeight(shapes[part].shape, lambda of=joined, part=part: separate_layer(of)[part])
    return layer


def _chosen(flat: dict[str, Any], only: NameFilter | None) -> dict[str, Any]:
    if only is None:
        return flat
    begins = () if callable(only) else (only,) if isinstance(only, str) or not isinstance(only, Iterable) else (*only,)
    if not all(isinstance(name, str) for name in begins):
        fix = "give a text, several, or a function of a name"
        raise ModelError("`only` must be beginnings of names, or a function", got=shown(only), fix=fix)
    chosen = {name: leaf for name, leaf in flat.items() if (only(name) if callable(only) else name.startswith(begins))}
    if not chosen:
        some = ", ".join(name[:60] for name in [*flat][:3])
        got = f"only={only!r}" if not callable(only) else "a function that takes none"
        raise ModelError("no weight has a name that `only` selects", got=got, fix=f"names are like {some}")
    return chosen


def _renamed(flat: dict[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The weights by their names here, and the entries of `names` that are like no given name."""
    plain, patterns = dict[str, str](), list[tuple[re.Pattern[str], str]]()
    if not isinstance(names, Mapping) or not all(isinstance(part, str) for pair in names.items() for part in pair):
        fix = "a dict of a trainer's names and those of `Params`"
        raise ModelError("`names` must map names to names", got=repr(names)[:80], fix=fix)
    for theirs, ours in names.items():
        if theirs.count("*") != ours.count("*"):
            raise ModelError(
                "the two sides of an entry of `names` have different numbers of *",
                got=f"{theirs!r}: {ours!r}",
                fix="give both a * for each number, in order",
            )
        if "*" in theirs:
            patterns.append((re.compile("([0-9]+)".join(map(re.escape, theirs.split("*")))), theirs))
        else:
            plain[theirs] = ours

    unused = dict.fromkeys(names)

    def ours_of(name: str) -> str:
        if name in plain:
            unused.pop(name, None)
            return plain[name]
        for pattern, theirs in patterns:
            if (match := pattern.fullmatch(name)) is not None:
                unused.pop(theirs, None)
                parts = names[theirs].split("*")
                return parts[0] + "".join(number + part for number, part in zip(match.groups(), parts[1:], strict=True))
        return name

    renamed = dict[str, Any]()
    for name, leaf in flat.items():
        if (ours := ours_of(name)) in renamed:
            raise ModelError(
                "two weights have the same name", got=f"{ours[:200]}, also of {name[:200]}", fix="correct `names`"
            )
        renamed[ours] = leaf
    return renamed, [*unused]


def _check_names(chosen: Mapping[str, Any], ours: Mapping[str, Any], *, may_lack: bool) -> None:
    if unknown := [name for name in chosen if name not in ours]:
        raise ModelError(
            f"weight {unknown[0][:200]} is not a weight of the model",
            got=f"{len(unknown)} such names{nearest(unknown[0], [*ours])}",
            fix="leave them out by `only`, or translate them by `names`",
        )
    if not may_lack and (missing := [name for name in ours if name not in chosen]):
        got = f"{len(chosen)} weights for {len(ours)}"
        raise ModelError(
            f"weight {missing[0]} is missing", got=got, fix="give all, or say by `only` which ones you give"
        )


def weights_of_checkpoint(
    config: ModelConfig, tensors: Mapping[str, Any], expected: Params, *, may_lack: bool
) -> dict[str, Any]:
    """Our weights by dotted names, of arrays by the names of transformers. Weights without tensors are left out if `may_lack`.

    Wrappers' parts of names are as in files. `expected` are the shapes of our weights in the checkpoint's sizes, apart, each
    once. Raises `ModelError` if a tensor is missing, is none of the model's, or has another shape; its name is as in `tensors`.
    """
    base = BASES[config.family]
    plain = plain_names(tensors, base)
    by_name = {plain[name]: tensor for name, tensor in tensors.items()}
    given_names = {plain[name]: name for name in tensors}
    has_base = any(base in name for name in tensors)

    def as_given(name: str) -> str:
        return given_names.get(name, name if has_base else name.removeprefix(base))

    if config.family in ("gemma", "gemma4", "qwen3_next", "nemotron_h"):
        by_name = text_tensors(by_name, config)
    stored = _StoredArrays.of(config, by_name)
    names, used_names, ours, missing = names_of(config, stored.shapes), set[str](), dict[str, Any](), list[str]()
    known_names = list[str]()
    blocks = [("embed", 0, names.embed, expected.embed), ("head", 0, names.head, expected.head)]
    blocks += [(f"layers.{i}", i, names.layer, layer) for i, layer in enumerate(expected.layers)]
    for prefix, i, places, block in blocks:
        for name, leaf in block.items():
            expected_shapes = places[name].tensors(leaf.shape, i)
            known_names += expected_shapes
            if not expected_shapes.keys() & stored.shapes.keys():
                missing += expected_shapes
                continue
            for tensor, shape in expected_shapes.items():
                if tensor not in stored.shapes:
                    got = f"others of {len(expected_shapes)}"
                    raise ModelError(f"weight {as_given(tensor)} is missing", got=got, fix="give all of them")
                if (given_shape := stored.shapes[tensor]) != shape:
                    raise ModelError(f"weight {as_given(tensor)} has another shape", got=given_shape, fix=f"{shape}")
            used_names |= expected_shapes.keys()
            ours[f"{prefix}.{name}"] = stored.weight(places[name], i, leaf.shape)
    head, embedding = names.head["unembed"].name, names.embed["embedding"].name
    if config.tie_embeddings and head in stored.shapes:
        stored.check_equal(head, embedding)
        used_names.add(head)
    if extra := sorted(name for name in stored.shapes if name not in used_names and not name.endswith(names.ignored)):
        name, there = as_given(extra[0]), [*map(as_given, known_names)]
        there += [f"{prefix}.{ours}" for prefix, _, _, block in blocks for ours in block]
        raise ModelError(
            "the model has no weight of this name",
            got=f"{name[:200]}{nearest(name, there)}, one of {len(extra)}",
            fix="give the names of transformers, or those of `Params` as layers.0.q; `names` translates others",
        )
    if missing and not may_lack:
        got, fix = f"{len(tensors)} weights", "give all, or say by `only` which ones you give"
        raise ModelError(f"weight {as_given(missing[0])} is missing", got=got, fix=fix)
    return ours


@final
@dataclass(frozen=True)
class _StoredArrays:
    arrays: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, StoredRows]

    @classmethod
    def of(cls, config: ModelConfig, arrays: Mapping[str, Any]) -> "_StoredArrays":
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        rows = rows_in(shapes, config, FUSED)
        return cls(arrays, shapes_with(shapes, rows), rows)

    def weight(self, place: StoredTensor | StoredExperts, i: int, shape: tuple[int, ...]) -> Any:
        if isinstance(place, StoredExperts):
            return LazyWeight(shape, lambda: self._experts(place, i, shape))
        name = place.name.format(i=i)
        if name in self.arrays and name not in self.rows and self.shapes[name] == shape and not place.inputs:
            return self.arrays[name]

        def make() -> Any:
            array = self._read(name)
            return (array.T if place.inputs else array).reshape(shape)

        return LazyWeight(shape, make)

    def _read(self, name: str) -> Any:
        if (rows := self.rows.get(name)) is None:
            return self.arrays[name]
        if len(spans := rows.spans(slice(None))) == 1:
            [(tensor, span)] = spans
            return self.arrays[tensor][span].reshape(rows.shape)
        tensors = [self.arrays[tensor].reshape(size, -1) for tensor, size in rows.tensors if size]
        return _numpy_or_jax(tensors).concatenate(tensors)[rows.order]

    def _experts(self, place: StoredExperts, i: int, shape: tuple[int, ...]) -> Shaped[Any, "X ..."]:
        apart = ["{x}" in name for name in place.names]
        tensors = [
            [
                self._read(name.format(i=i, x=x)) if own else self._read(name.format(i=i))[x]
                for name, own in zip(place.names, apart, strict=True)
            ]
            for x in range(shape[0])
        ]
        arrays = _numpy_or_jax([tensor for expert in tensors for tensor in expert])
        return arrays.stack([place.as_ours(arrays.concatenate(expert), shape[1:]) for expert in tensors])

    def check_equal(self, head: str, embedding: str) -> None:
        """Raise `ModelError` unless the head's weights are the embedding's, which serve as both."""
        tensor = self._read(head)
        equal = embedding in self.shapes
        if equal and (other := self._read(embedding)) is not tensor:
            equal = tensor.shape == other.shape and bool(_numpy_or_jax([tensor, other]).array_equal(tensor, other))
        if not equal:
            raise ModelError(
                "the served model's head is its embedding",
                got=f"{head}, which is not {embedding}",
                fix="start with a checkpoint whose head is its own",
            )


def _numpy_or_jax(arrays: Iterable[Any]) -> Any:
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
