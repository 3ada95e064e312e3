"""Room for adapters beside a model's weights. Adapters are written into it at the start and while the model serves.

All adapters have the same room: as many columns in each weight that adapters may change, zeros where one changes nothing. So a
step's executables are the same whichever adapters are there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jinfercept.errors import ModelError
from jinfercept.models.adapted import AdaptedTensor, is_adapted
from jinfercept.models.joined_weights import JOINED, SIDES
from jinfercept.models.mesh import ModelMesh, mesh_of, place
from jinfercept.models.model import Model, abstract_params
from jinfercept.models.protocol import Params, Weights
from jinfercept.models.quantized import weights_of
from jinfercept.models.sharding import fit, mesh_axes
from jinfercept.models.weight_axes import NUM_INPUTS

WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "delta_o")
"""Names of the weights, apart, that adapters may change."""
_PARTS = JOINED | SIDES


class Factors(NamedTuple):
    """An adapter's matrices for one weight, whose change is `a @ b`."""

    a: Float[np.ndarray, "*inputs R"]
    b: Float[np.ndarray, "R *outputs"]


class AdapterWeights(NamedTuple):
    """An adapter in the shapes of a model's checkpoint."""

    layers: tuple[Mapping[str, Factors], ...]  # by layer, then by the name of an unjoined weight
    rank: int  # the largest of its modules
    digest: str  # of all its numbers, hexadecimal

    @property
    def weights(self) -> frozenset[str]:
        """Names of the weights that it changes, in any layer."""
        return frozenset(name for layer in self.layers for name in layer)


@dataclass(frozen=True)
class AdapterRoom:
    """The number of adapters that there is room for, their rank, and the unjoined weights that they may change."""

    slots: int
    rank: int
    weights: frozenset[str]

    def __str__(self) -> str:
        names = ", ".join(name for name in WEIGHTS if name in self.weights)
        return f"{self.slots} of rank {self.rank} for {names}"


def with_room(model: Model, params: Params, room: AdapterRoom) -> Params:
    """Give a model's weights, as it serves them, room for adapters, all of which are zeros."""
    mesh, dtype = mesh_of(weights_of(params.embed)[0]), weights_of(params.layers[0])[0].dtype
    shapes = _served_shapes(model)

    def adapted(name: str, weight: Any, apart: Weights) -> Any:
        parts = _PARTS.get(name, (name,))
        present = [part for part in parts if part in room.weights and part in apart]
        if not present:
            return weight
        columns, first = room.slots * room.rank, apart[present[0]]
        inputs = NUM_INPUTS[present[0]]
        a_shape = (*first.shape[:inputs], len(present), columns)
        a = jnp.zeros(a_shape, dtype, device=mesh.sharding(_a_spec(present[0])))
        b = tuple(
            jnp.zeros(
                (columns, *_part_shape(part, apart, len(parts))), dtype, device=mesh.sharding(_b_spec(part, len(parts)))
            )
            if part in present
            else None
            for part in parts
        )
        return AdaptedTensor(weight, a, b)

    layers = tuple(
        {name: adapted(name, weight, apart) for name, weight in layer.items()}
        for layer, apart in zip(params.layers, shapes.layers, strict=True)
    )
    return params._replace(layers=layers)


def with_adapter(model: Model, params: Params, slot: int, rank: int, adapter: AdapterWeights | None) -> Params:
    """Write an adapter, or zeros for None, into a slot, counted from 1, of weights with room of this rank. Raises `ModelError`
    if a number of the adapter is too large for the type of the weights."""
    mesh, shapes = mesh_of(weights_of(params.embed)[0]), _served_shapes(model)
    start = jnp.asarray((slot - 1) * rank, jnp.int32)
    layers = list[Weights]()
    for index, (layer, apart) in enumerate(zip(params.layers, shapes.layers, strict=True)):
        own = {} if adapter is None else adapter.layers[index]
        room = {name: weight for name, weight in layer.items() if is_adapted(weight)}
        matrices = {name: (weight.a, weight.b) for name, weight in room.items()}
        new = {name: _padded(name, weight, own, apart, rank, mesh) for name, weight in room.items()}
        written = _write(matrices, new, start)
        layers.append(layer | {name: replace(room[name], a=a, b=b) for name, (a, b) in written.items()})
    return params._replace(layers=tuple(layers))


def adapter_matrices(params: Params) -> list[dict[str, AdaptedTensor]]:
    """The weights that have room for adapters, by layer."""
    return [{name: weight for name, weight in layer.items() if is_adapted(weight)} for layer in params.layers]


def with_matrices_of(params: Params, present: Params) -> Params:
    """Give weights without adapters the adapters of `present`."""
    layers = tuple(
        layer | {name: replace(weight, base=layer[name]) for name, weight in adapted.items()}
        for layer, adapted in zip(params.layers, adapter_matrices(present), strict=True)
    )
    return params._replace(layers=layers)


@jax.jit
def _write(matrices: Any, new: Any, start: Int[Array, ""]) -> Any:
    def put(name: str) -> Any:
        (a, b), (new_a, new_b) = matrices[name], new[name]
        written = [
            None if whole is None else jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)
            for whole, part in zip(b, new_b, strict=True)
        ]
        return jax.lax.dynamic_update_slice_in_dim(a, new_a, start, axis=a.ndim - 1), tuple(written)

    return {name: put(name) for name in matrices}


def _padded(
    name: str, room: AdaptedTensor, own: Mapping[str, Factors], apart: Weights, rank: int, mesh: ModelMesh
) -> tuple[Any, tuple[Any, ...]]:
    parts, dtype = _PARTS.get(name, (name,)), room.a.dtype
    present = [part for part, b in zip(parts, room.b, strict=True) if b is not None]
    a = np.zeros((*room.a.shape[:-1], rank), np.float32)
    b = list[Any]()
    for part, matrix in zip(parts, room.b, strict=True):
        if matrix is None:
            b.append(None)
            continue
        shape = _part_shape(part, apart, len(parts))
        outer = np.zeros((rank, *shape), np.float32)
        if (factors := own.get(part)) is not None:
            own_rank = factors.a.shape[-1]
            a[..., present.index(part), :own_rank] = factors.a
            served = (own_rank, *apart[part].shape[NUM_INPUTS[part] :])
            fitting = factors.b if NUM_INPUTS[part] > 1 else fit(part, factors.b, served)
            outer[:own_rank] = fitting.reshape(own_rank, *shape)
        b.append(place(_rounded(outer, dtype), mesh.sharding(_b_spec(part, len(parts)))))
    return place(_rounded(a, dtype), mesh.sharding(_a_spec(present[0]))), tuple(b)


def _rounded(matrix: Float[np.ndarray, "..."], dtype: Any) -> Float[np.ndarray, "..."]:
    with np.errstate(over="ignore"):
        rounded = matrix.astype(dtype)
    # rows of other adapters would notice an infinite number
    if not np.isfinite(rounded.astype(np.float32)).all():
        raise ModelError(
            "an adapter's numbers are too large for the model's type",
            got=f"{np.abs(matrix).max():.3g} in {rounded.dtype}, with the scale of lora_alpha",
            fix="correct adapter_config.json, or serve the model in bfloat16",
        )
    return rounded


def _served_shapes(model: Model) -> Params:
    return abstract_params(model.config, jnp.float32, joined=False)


def _part_shape(name: str, apart: Weights, num_parts: int) -> tuple[int, ...]:
    outputs = apart[name].shape[NUM_INPUTS[name] :]
    if num_parts == 1:
        return outputs
    # several parts are joined along the axis before the last
    if num_parts == 2:
        return (1, *outputs)
    num_kv_heads = apart["k"].shape[1]
    return (num_kv_heads, outputs[0] // num_kv_heads, *outputs[1:])


def _a_spec(name: str) -> PartitionSpec:
    # as the weight's inputs
    return PartitionSpec(*mesh_axes(name)[: NUM_INPUTS[name]])


def _b_spec(name: str, num_parts: int) -> PartitionSpec:
    # as the weight's outputs
    outputs = mesh_axes(name)[NUM_INPUTS[name] :]
    return PartitionSpec(None, *((None,) if num_parts == 2 else ()), *outputs)


def room_for(adapters: Iterable[AdapterWeights], slots: int | None, rank: int | None) -> AdapterRoom:
    """The room that options ask for.

    Args:
        adapters: those at the start.
        slots: adapters, which may change any weights; None: those at the start alone.
        rank: of any adapter; None: the largest of those at the start, or 16 without any.
    """
    listed = [*adapters]
    most = max([adapter.rank for adapter in listed], default=16)
    weights = (
        frozenset(WEIGHTS) if slots is not None else frozenset[str]().union(*(adapter.weights for adapter in listed))
    )
    return AdapterRoom(len(listed) if slots is None else slots, most if rank is None else rank, weights)
