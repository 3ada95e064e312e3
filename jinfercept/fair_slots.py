"""Slots for work, in which keys take turns: API keys for the threads of a server, tenants for the calls of a tool."""

import asyncio
from dataclasses import dataclass, field
from typing import final


@dataclass(slots=True)
class _KeyWork:
    """The work of one key: the number of its slots, and what waits for one in order of arrival."""

    running: int = 0
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict[asyncio.Future[None], None])


@final
class FairSlots:
    """Slots in which keys take turns. Belongs to one event loop.

    A free slot goes to the key with the fewest slots; of several, to the one whose last work began or ended longest ago; of the
    work of this key, to the oldest.

    Args:
        slots: of all keys together.
        most_of_key: slots that one key may have at a time; None: all.
    """

    def __init__(self, slots: int, most_of_key: int | None = None) -> None:
        self._free, self._most_of_key = slots, slots if most_of_key is None else most_of_key
        self._keys: dict[str, _KeyWork] = {}  # with slots or waiting; last the one whose work began or ended last

    async def begin(self, key: str) -> None:
        """Wait for a slot and take it. Work that is cancelled while it waits takes none."""
        work = self._keys.setdefault(key, _KeyWork())
        if self._free and work.running < self._most_of_key:
            self._take(key)
            return
        place = asyncio.get_running_loop().create_future()
        work.waiting[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(key, place)
            else:  # it has a slot already
                self.end(key)
            raise

    def end(self, key: str) -> None:
        """Free a slot of a key."""
        self._free += 1
        self._count(key, -1)
        self._next()

    def close(self, error: Exception) -> None:
        """Fail all that waits."""
        for work in self._keys.values():
            for place in work.waiting:
                if not place.done():
                    place.set_exception(error)
            work.waiting.clear()

    def _next(self) -> None:
        """Give a free slot to what waits next."""
        while (key := self._whose_turn()) is not None:
            waiting = self._keys[key].waiting
            place = next(iter(waiting))
            del waiting[place]
            if not place.cancelled():
                self._take(key)
                place.set_result(None)
                return

    def _whose_turn(self) -> str | None:
        may_begin = (key for key, work in self._keys.items() if work.waiting and work.running < self._most_of_key)
        return min(may_begin, key=lambda key: self._keys[key].running, default=None)

    def _take(self, key: str) -> None:
        self._free -= 1
        self._count(key, 1)

    def _count(self, key: str, change: int) -> None:
        """Change the number of a key's slots."""
        work = self._keys.pop(key)
        work.running += change
        if work.running or work.waiting:
            self._keys[key] = work

    def _leave(self, key: str, place: asyncio.Future[None]) -> None:
        if (work := self._keys.get(key)) is not None:
            work.waiting.pop(place, None)
            if not work.running and not work.waiting:
                del self._keys[key]
