"""The host memory of devices: copies of arrays go there and back; the copies of the last two steps may be under way."""

from collections import deque
from collections.abc import Sequence
from typing import TypeGuard, cast, final

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from jinfercept.models.mesh import move


@final
class HostMemory:
    """Copies arrays between devices and their host memory, each device's part by itself.

    Args:
        on_device: where the arrays lie on the devices.
        pinned: whether those on the host are page-locked; else they are pageable, and the host waits for each that leaves.

    Attributes:
        is_busy: the last two steps moved something to the host.
    """

    def __init__(self, on_device: Sharding, *, pinned: bool) -> None:
        self._on_device, self._pinned = on_device, pinned
        self._on_host = on_device.with_memory_kind("pinned_host")
        self._in_flight: deque[list[Array]] = deque(maxlen=2)  # what the last two steps moved to the host
        self.is_busy = False

    def begin(self) -> None:
        """Begin a step, which has to if it moves something to the host or if this is busy. Waits for what the step before the
        last one moved there, if its compute did not hide it, so that no more than two steps' transfers are in flight."""
        if len(self._in_flight) == 2 and self._in_flight[0]:
            jax.block_until_ready(self._in_flight[0])
        self._in_flight.append([])
        self.is_busy = any(self._in_flight)

    def to_device(self, arrays: Sequence[Array | np.ndarray]) -> list[Array]:
        """Dispatch copies to the devices."""
        return move(cast(Sequence[Array], arrays), self._on_device)

    def to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Dispatch copies of arrays of the devices to the host."""
        copies = move(arrays, self._on_host) if self._pinned else cast(list[Array], list(map(np.asarray, arrays)))
        self._in_flight[-1] += copies
        self.is_busy = True
        return copies

    def keep(self, arrays: Sequence[np.ndarray]) -> list[Array | np.ndarray]:
        """Arrays of numpy as arrays in the host memory that copies lie in. Any thread may call it."""
        return jax.device_put(list(arrays), self._on_host) if self._pinned else list(arrays)

    def close(self) -> None:
        """Forget the copies in flight."""
        self._in_flight.clear()


def is_whole(array: Array | None) -> TypeGuard[Array]:
    """Whether an array is there and was computed; waits. A step that fails leaves arrays that are donated, or are its error."""
    try:
        return array is not None and array.block_until_ready() is array
    except RuntimeError:
        return False
