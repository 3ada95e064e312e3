"""Weights in memory with the names and shapes of a Hugging Face checkpoint, as ours; each is made when it is written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError, nearest
from jinfercept.models.checkpoint import StoredExperts, StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.hf_weights import BASES, FUSED, names_of
from jinfercept.models.protocol import Params
from jinfercept.models.stored_rows import StoredRows, rows_in, shapes_with
from jinfercept.models.stored_weights import LazyWeight
from jinfercept.models.weight_files import plain_names, text_tensors


def weights_of_checkpoint(
    config: ModelConfig, tensors: Mapping[str, Any], expected: Params, *, may_lack: bool
) -> dict[str, Any]:
    """Our weights by dotted names, of tensors by the names of transformers. Those of which no tensor is there are left out.

    Args:
        config: as the checkpoint has it.
        tensors: arrays. Wrappers' parts of names are as in files.
        expected: the shapes of our weights in the checkpoint's sizes, apart, every one once.
        may_lack: whether weights may have no tensors.

    Raises:
        ModelError: a tensor is missing, is none of the model's, or has another shape; its name is as in `tensors`.
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
    blocks = [("embed", 0, names.embed, expected.embed), ("head", 0, names.head, expected.head)]
    blocks += [(f"layers.{i}", i, names.layer, layer) for i, layer in enumerate(expected.layers)]
    for prefix, i, places, block in blocks:
        for name, leaf in block.items():
            expected_shapes = places[name].tensors(leaf.shape, i)
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
        there = [f"{prefix}.{ours}" for prefix, _, _, block in blocks for ours in block]
        there += [
            as_given(name)
            for _, i, at, block in blocks
            for ours in block
            for name in at[ours].tensors(block[ours].shape, i)
        ]
        name = as_given(extra[0])
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
    """Arrays by the names of tensors, or rows of such arrays."""

    arrays: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, StoredRows]

    @classmethod
    def of(cls, config: ModelConfig, arrays: Mapping[str, Any]) -> "_StoredArrays":
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        rows = rows_in(shapes, config, FUSED)
        return cls(arrays, shapes_with(shapes, rows), rows)

    def weight(self, place: StoredTensor | StoredExperts, i: int, shape: tuple[int, ...]) -> Any:
        """Layer i's weight, in our shape: an array that is stored so, or a `LazyWeight`."""
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
