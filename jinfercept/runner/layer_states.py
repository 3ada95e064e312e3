"""The device arrays of recurrent layers' states, between the pages of the others: what groups of layers read and write.

A sequence's states go to the host and come back whole, as pages do.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jinfercept.kv.page import PageCopy
from jinfercept.layouts.states import StateArray
from jinfercept.models.mesh import Placed, beside
from jinfercept.models.parallel import AXIS
from jinfercept.runner.executables import Executables
from jinfercept.runner.host_memory import HostMemory, is_whole
from jinfercept.runner.state_transfers import STATE_SPEC, HostState, add_state_transfers
from jinfercept.runner.step_upload import CommonShape, TransferSlots

type States = tuple[tuple[StateArray, ...], ...]
"""The state of every layer of a model, see `protocol.states_of`; () if no layer has one."""


def with_states(pages: Sequence[Any], states: Sequence[Any]) -> tuple[Any, ...]:
    """What every layer keeps: its states, or pages where it has none.

    Args:
        pages: of the layers that have some.
        states: of all layers, () for those with pages; () if no layer has states.
    """
    if not states:
        return tuple(pages)
    iterator = iter(pages)
    return tuple(of_layer or next(iterator) for of_layer in states)


def state_shapes(states: States, num_slots: int, like: Placed) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """The arrays of every layer's states, with their places.

    Args:
        num_slots: without the one that is no sequence's.
        like: an array with the dtype of the weights, on their devices.
    """

    def struct(array: StateArray) -> jax.ShapeDtypeStruct:
        dtype: DTypeLike = array.dtype or like.dtype
        cut = () if array.cut_axis is None else (*(None,) * (1 + array.cut_axis), AXIS)
        sharding = beside(like, PartitionSpec(*cut))
        return jax.ShapeDtypeStruct((num_slots + 1, *array.shape), dtype, sharding=sharding)

    return tuple(tuple(map(struct, of_layer)) for of_layer in states)


def slot_bytes(states: States, dtype: DTypeLike, num_devices: int = 1) -> int:
    """Bytes of one sequence's states over all layers, on each of the devices.

    Args:
        dtype: of the weights.
    """

    def num_bytes(array: StateArray) -> int:
        parts = 1 if array.cut_axis is None else num_devices
        return math.prod(array.shape) * jnp.dtype(array.dtype or dtype).itemsize // parts

    return sum(num_bytes(array) for of_layer in states for array in of_layer)


@final
class LayerStates:
    """The states of all layers of a model on its devices, and copies of sequences' states on the host.

    `reset` allocates them. A step calls the methods that it calls of `page_arrays.KVArrays`, in the same order. A sequence's
    states are moved by a transfer of their own. There is one part: they cross the link during all of a step's compute.

    Args:
        shapes: see `state_shapes`; some layer has states.
        common_shape: of the step's uploads.
        pinned: see `KVArrays`.
        most_moved: sequences for whose states the device has memory beside the others while they are on their way.

    Attributes:
        arrays: of every layer; () while there are none.
        host: the copies by host slot.
        slots: where the step's uploads have the slots that `begin` returned.
    """

    def __init__(
        self,
        shapes: tuple[tuple[jax.ShapeDtypeStruct, ...], ...],
        common_shape: CommonShape,
        *,
        pinned: bool = True,
        most_moved: int = 1 << 30,
    ) -> None:
        self._shapes, self._common_shape, self._most_moved = shapes, common_shape, most_moved
        self.arrays: tuple[tuple[Array, ...], ...] = ()
        self.host: dict[int, HostState] = {}
        like = next(chain.from_iterable(shapes))
        self.slots = TransferSlots(beside(like))
        self._host_memory = HostMemory(beside(like, STATE_SPEC), pinned=pinned)
        self._offloads: list[int] = []  # host slots
        self._fetches: list[HostState] = []
        self._early = 0  # fetches whose arrays come during the compute
        self._arrived: list[Array] = []  # on the device, of the early fetches

    def add_executables(self, run: Executables) -> None:
        """Add the transfers' executables, which `offload` and `scatter` call."""
        self._run = run
        add_state_transfers(run, self._shapes, self._common_shape)

    def reset(self) -> None:
        """Forget all states. The arrays stay as they are, with what is in them; those that are missing are allocated."""
        self._forget()
        self.come_back()

    def leave_device(self) -> None:
        """Free the arrays, when every copy has arrived. The host's copies stay."""
        self.wait()
        self._drop_transfers()
        for array in jax.tree.leaves(self.arrays):
            array.delete()
        self.arrays = ()

    def come_back(self) -> None:
        """Allocate the arrays as `KVArrays.come_back` does."""

        def made(shape: jax.ShapeDtypeStruct, array: Array | None = None) -> Array:
            return array if is_whole(array) else jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

        self.arrays = jax.block_until_ready(jax.tree.map(made, self._shapes, *([self.arrays] if self.arrays else [])))

    def close(self) -> None:
        """Free everything, on the device and on the host."""
        self._forget()
        self.arrays = ()

    def _forget(self) -> None:
        self._drop_transfers()
        self.host.clear()
        self._host_memory.close()

    def _drop_transfers(self) -> None:
        self._offloads, self._fetches, self._arrived, self.slots.commons = [], [], [], ()

    def begin(
        self, fetch: Sequence[PageCopy], drop: Iterable[int], offload: Sequence[PageCopy], first_transfer: int = 0
    ) -> list[Int32[np.ndarray, "1"]]:
        """Set the states that a step moves, as `KVArrays.begin` does for pages."""
        self.slots.first = first_transfer
        self._host_memory.begin()
        self._fetches = [self.host[copy.host_slot] for copy in fetch]
        for slot in drop:
            del self.host[slot]
        self._offloads = [copy.host_slot for copy in offload]
        assert self.host.keys().isdisjoint(self._offloads)
        self._early = max(1, self._most_moved - len(offload))
        return [np.array([copy.device_slot], np.int32) for copy in chain(offload, fetch)]

    def fetch(self, part: int) -> None:
        """Dispatch copies to the device."""
        coming = [*chain.from_iterable(self._fetches[: self._early])]
        if coming:
            self._arrived = self._host_memory.to_device(coming)

    def offload(self, part: int) -> None:
        """Dispatch copies to the host: the states as they are before anything dispatched later."""
        for number, host_slot in enumerate(self._offloads):
            self.host[host_slot] = self._host_memory.to_host(self._run["gather"](self.arrays, *self.slots[number]))

    def scatter(self, part: int) -> None:
        """Write the fetched states to their device slots, after everything dispatched before."""
        arrived, self._arrived = iter(self._arrived), []
        for number, state in enumerate(self._fetches):
            early = number < self._early
            arrays = tuple(islice(arrived, len(state)) if early else self._host_memory.to_device(state))
            self.arrays = self._run["scatter"](self.arrays, *self.slots[len(self._offloads) + number], arrays)

    def wait(self) -> None:
        """Wait for every copy in flight."""
        jax.block_until_ready((self.arrays, list(self.host.values())))

    def beside(self, pages: Sequence[Array]) -> list[Any]:
        """What every layer keeps, of the pages of those that have some."""
        return list(with_states(pages, self.arrays))

    def take(self, layers: Sequence[Any]) -> tuple[Array, ...]:
        """Take what the layers keep behind a step; returns the pages."""
        self.arrays = tuple(array if shapes else () for array, shapes in zip(layers, self._shapes, strict=True))
        return tuple(array for array, shapes in zip(layers, self._shapes, strict=True) if not shapes)
