"""Reads the stacked weights of a layer's experts onto the devices: each device gets its experts, or its parts of experts."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.models.checkpoint import Checkpoint, StoredExperts
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.sharding import WEIGHT_AXES, expert_parts, partition_spec
from jinfercept.models.stored_weights import read_floats


def read_experts(
    checkpoint: Checkpoint, place: StoredExperts, layer: int, name: str, wanted: jax.ShapeDtypeStruct, mesh: ModelMesh
) -> jax.Array:
    """A weight of a layer's experts on its devices. The host holds one device's part of it at a time.

    Args:
        name: of the weight, ours.
        wanted: its shape as the devices cut it, and its dtype.
    """
    experts = checkpoint.config.experts
    assert experts is not None
    num_parts = wanted.shape[0] // experts.num_experts
    axes = zip(WEIGHT_AXES[name], wanted.shape, strict=True)
    whole = tuple(size * num_parts if axis == "expert_ffn" else size for axis, size in axes)[1:]

    def stored(tensor: str, expert: int) -> Shaped[np.ndarray, "N ..."]:
        if "{x}" in tensor:
            return read_floats(checkpoint, tensor.format(i=layer, x=expert), slice(None))
        return read_floats(checkpoint, tensor.format(i=layer), slice(expert, expert + 1))[0]

    @lru_cache(1)
    def parts(expert: int) -> list[Shaped[np.ndarray, "..."]]:
        weight = np.concatenate([stored(tensor, expert) for tensor in place.names])
        match place.order:
            case "out_in":
                weight = weight.T.reshape(whole)
            case "interleaved":
                weight = weight.reshape(*weight.shape[:-1], -1, 2).swapaxes(-1, -2)
            case "ours":
                pass
        return expert_parts(name, weight, num_parts)

    def of_device(index: Any) -> Shaped[np.ndarray, "..."]:
        numbers = range(wanted.shape[0])[index[0]]
        weights = np.empty((len(numbers), *wanted.shape[1:]), wanted.dtype)
        for place_here, number in enumerate(numbers):
            weights[place_here] = parts(number // num_parts)[number % num_parts]
        return weights

    sharding = mesh.sharding(partition_spec(name))
    return jax.block_until_ready(jax.make_array_from_callback(wanted.shape, sharding, of_device))
