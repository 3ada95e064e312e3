"""`ModelMesh`: the devices that serve a model. Places arrays on them, and runs functions on every device's parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jinfercept.models.parallel import AXIS

type Placed = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape with a sharding."""
EVERYWHERE = PartitionSpec()
"""Whole on every device."""


@dataclass(frozen=True)
class ModelMesh:
    """One device, or several in a line, along which arrays are cut: different devices of one platform."""

    devices: tuple[Any, ...]

    @classmethod
    def default(cls) -> Self:
        """JAX's default device. Raises `RuntimeError` if its platform has none."""
        chosen = cast(Any, jax.config.jax_default_device)
        if chosen is None or isinstance(chosen, str):  # the name of a platform
            chosen = jax.local_devices(backend=chosen)[0]
        return cls((chosen,))

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """The devices of this process, among several processes of JAX."""
        return tuple(device for device in self.devices if device.process_index == jax.process_index())

    def sharding(self, spec: PartitionSpec = EVERYWHERE) -> Sharding:
        """The placement of an array in the devices' own memory; one device has all of it, whatever the spec."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0], memory_kind="device")
        return NamedSharding(self._mesh, spec, memory_kind="device")

    def on_parts[**P, R](self, function: Callable[P, R], specs: tuple[Any, ...], out: Any) -> Callable[P, R]:
        """The function on every device's parts of its arguments; on one device, the function itself. `specs` and `out` say how
        arguments and results are cut, as trees of partition specs or their first levels; `parallel.py` has what devices
        exchange."""
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))


def mesh_of(array: Placed) -> ModelMesh:
    """The devices of an array, in the order in which it is cut."""
    sharding = cast(Sharding, array.sharding)
    if isinstance(sharding, NamedSharding):
        return ModelMesh(tuple(cast(Mesh, sharding.mesh).devices.flat))
    return ModelMesh(tuple(sharding.device_set))


def beside(array: Placed, spec: PartitionSpec = EVERYWHERE) -> Sharding:
    """The placement of another array on the devices of this one. One device has all of it, whatever the spec."""
    sharding = cast(Sharding, array.sharding)
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(
        sharding.mesh, spec if sharding.mesh.size > 1 else EVERYWHERE, memory_kind=sharding.memory_kind
    )


def place(arrays: Any, sharding: Sharding) -> Any:
    """Put a tree of numpy arrays on devices. Every process that has some of the devices must have the same arrays; nothing
    compares them."""
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__), arrays)


def move(arrays: Sequence[Any], sharding: Sharding) -> list[Any]:
    """Copy arrays, or trees of arrays, to another memory of their devices; `sharding` is theirs, but for the memory."""
    if sharding.is_fully_addressable:
        return jax.device_put(list(arrays), sharding)
    # JAX would compile the copy of an array that other processes have parts of, and run it between the steps.
    leaves, tree = jax.tree.flatten(list(arrays))
    parts = [shard.data for array in leaves for shard in array.addressable_shards]
    copied = iter(jax.device_put(parts, [part.sharding.with_memory_kind(sharding.memory_kind) for part in parts]))
    moved = [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copied) for _ in array.addressable_shards]
        )
        for array in leaves
    ]
    return tree.unflatten(moved)


def local_bytes(array: Placed) -> int:
    """Bytes of an array's part on one device."""
    shape = cast(Sharding, array.sharding).shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize


def over_devices[**P, R](function: Callable[P, R], arguments: tuple[Any, ...], out: Any = EVERYWHERE) -> Callable[P, R]:
    """The function on every device's parts of its arguments, see `ModelMesh.on_parts`: arrays or shapes with shardings; those
    without are whole on every device."""
    placed = [leaf for leaf in jax.tree.leaves(arguments) if getattr(leaf, "sharding", None) is not None]
    return mesh_of(placed[0]).on_parts(function, specs_of(arguments), out)


def specs_of(arrays: Any) -> Any:
    """How devices cut a tree of arrays or shapes; those without sharding are whole on every device."""
    return jax.tree.map(lambda leaf: getattr(getattr(leaf, "sharding", None), "spec", EVERYWHERE), arrays)
