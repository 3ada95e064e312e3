"""`AdapterTable`: which adapters requests may name, and which requests hold them. Knows no weights.

A request is served by the adapter that had its name when the request was made. An adapter that is unloaded or replaced keeps
its slot until its last request has ended, paused ones included. A new adapter of the same name gets another slot.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from jinfercept.errors import ConfigError, RequestError, nearest, shown
from jinfercept.request import Adapter


@final
class AdapterTable:
    """The adapters of a model, whose weights have room for `num_slots`. All methods may be called from any thread."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._versions: dict[str, int] = {}  # of the latest of each name, unloaded ones too
        self._held: dict[str, Adapter] = {}  # by request id
        self._reserved: dict[int, str] = {}  # slots that are being written, and the names of their adapters

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which the adapters were loaded."""
        return tuple(self._named)

    @property
    def directories(self) -> dict[str, str]:
        """The directories that the adapters were read from, by name."""
        return {name: adapter.source for name, adapter in tuple(self._named.items())}

    def get(self, name: str) -> Adapter | None:
        """The adapter that has this name now."""
        return self._named.get(name)

    def find(self, name: str) -> Adapter:
        """The adapter that has this name now. Raises `RequestError` if there is none."""
        adapter = self._named.get(name)
        if adapter is None:
            fix = f"one of {', '.join(self._named)}" if self._named else "load one: `loras`, or `load_lora`"
            name = str(name)
            raise RequestError("there is no such adapter", got=f"{name[:200]}{nearest(name, self.names)}", fix=fix)
        return adapter

    @contextmanager
    def new_slot(self, name: str, *, replace: bool = False) -> Iterator[int]:
        """Reserve a free slot, from 1 on, while an adapter is written into it.

        Args:
            replace: whether another adapter may have the name.

        Raises:
            ConfigError: the name is taken or none, or every slot is taken.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError("an adapter has a name", got=shown(name), fix="give a text that is not empty")
        with self._lock:
            if (name in self._named or name in self._reserved.values()) and not replace:
                raise ConfigError("an adapter already has this name", got=name, fix="unload it, or load it in place")
            used_slots = {adapter.slot for adapter in (*self._named.values(), *self._held.values())}
            used_slots |= self._reserved.keys()
            slot = next((slot for slot in range(1, self.num_slots + 1) if slot not in used_slots), None)
            if slot is None:
                ending = len(used_slots) - len(self._named)
                waits = f", and {ending} whose requests have not ended" if ending else ""
                raise ConfigError(
                    "every slot for adapters is in use",
                    got=f"{len(self._named)} of {self.num_slots}{waits}",
                    fix="unload one, or start with a larger max_loras",
                )
            self._reserved[slot] = name
        try:
            yield slot
        finally:
            with self._lock:
                self._reserved.pop(slot, None)

    def put(self, adapter: Adapter) -> Adapter:
        """Serve an adapter by its name to later requests; return it with its version. Earlier requests keep theirs."""
        with self._lock:
            version = self._versions[adapter.name] = self._versions.get(adapter.name, -1) + 1
            self._named[adapter.name] = adapter = adapter._replace(version=version)
        return adapter

    def remove(self, name: str) -> Adapter:
        """Take a name away; requests that hold the adapter go on. Raises `RequestError` if there is none."""
        adapter = self.find(name)
        with self._lock:
            self._named.pop(name, None)
        return adapter

    def hold(self, request_id: str, adapter: Adapter) -> None:
        """Keep a request's adapter until `release`. Raises `RequestError` if it was unloaded or replaced."""
        with self._lock:
            if self._named.get(adapter.name) != adapter:
                raise RequestError(
                    "the adapter was unloaded or replaced", got=adapter.name, fix="make the request again"
                )
            self._held[request_id] = adapter

    def release(self, request_id: str) -> None:
        """End what `hold` began. Requests that hold no adapter are ignored."""
        with self._lock:
            self._held.pop(request_id, None)
