"""Responses that were asked to be stored, in memory: each for a while, the oldest gone first, found only with its own key."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, final

from jinfercept.server.encoding import encode
from jinfercept.server.errors import ApiError
from jinfercept.server.responses_items import Item

MOST_BYTES = 2**29
"""Answers are not counted, the events of those in the background are; what several go on from counts for each of them."""
_OPEN = ("queued", "in_progress")


class Background(Protocol):
    """A response that nobody waits for.

    Attributes:
        num_bytes: that it keeps of its events.
    """

    @property
    def num_bytes(self) -> int: ...

    async def cancel(self) -> None:
        """Give it up; its response is final afterwards."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """Its events from one on. Raises 400 if they were not kept."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and what it answers.

    Attributes:
        owner: whose key it was asked with.
        response: as it stands; whoever writes it changes it.
        before: the conversation that it went on from.
        asked: what was said then.
        background: what writes it without anybody waiting; None if somebody does.
    """

    owner: str
    response: dict[str, Any]
    before: Sequence[Item]
    asked: Sequence[Item]
    background: Background | None = None

    @property
    def is_open(self) -> bool:
        """Whether it still changes."""
        return self.response["status"] in _OPEN

    @property
    def conversation(self) -> list[Item]:
        """All that a follow-up goes on from."""
        return [*self.before, *self.asked, *self.response["output"]]


class _Entry(NamedTuple):
    stored: Stored
    until_s: float
    num_bytes: int


@final
class ResponseStore:
    """Times are seconds of any clock that does not go back.

    Args:
        ttl_s: for which one is stored.
        most: that are stored.
        most_bytes: of all that is stored.
    """

    def __init__(self, ttl_s: float, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._ttl_s, self._most, self._most_bytes = ttl_s, most, most_bytes
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._num_bytes = 0
        self._running: set[str] = set()  # of which the events are not counted

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, stored: Stored, now: float) -> None:
        """Store one that is new. What runs in the background gives no place."""
        previous = self._entries.get(stored.response["previous_response_id"] or "")
        num_bytes = len(encode([stored.response, *stored.asked])) + (previous.num_bytes if previous else 0)
        self._entries[stored.response["id"]] = _Entry(stored, now + self._ttl_s, num_bytes)
        self._num_bytes += num_bytes
        if stored.background is not None:
            self._running.add(stored.response["id"])
        self._expire(now)
        self._count_events()
        for name, entry in list(self._entries.items()):
            if len(self._entries) <= self._most and self._num_bytes <= self._most_bytes:
                break
            if not _runs(entry.stored):
                self._drop(name)

    def get(self, response_id: str, owner: str, now: float) -> Stored:
        """One of the owner's; raises 404."""
        self._expire(now)
        entry = self._entries.get(response_id)
        if entry is None or entry.stored.owner != owner:
            raise ApiError(404, f"there is no response {response_id[:200]!r}", code="response_not_found")
        return entry.stored

    def item(self, item_id: str, owner: str, now: float) -> Item:
        """An item of one of the owner's responses; raises 404."""
        self._expire(now)
        for item in self._items(owner):
            if item["id"] == item_id:
                return item
        raise ApiError(404, f"there is no item {item_id[:200]!r}", param="input", code="item_not_found")

    def delete(self, response_id: str, owner: str, now: float) -> Stored:
        """Store it no longer; raises 404."""
        stored = self.get(response_id, owner, now)
        self._drop(response_id)
        return stored

    def _items(self, owner: str) -> Iterator[Item]:
        for entry in self._entries.values():
            if entry.stored.owner == owner:
                yield from entry.stored.asked
                yield from entry.stored.response["output"]

    def _expire(self, now: float) -> None:
        past = takewhile(lambda name: self._entries[name].until_s <= now, self._entries)
        for name in list(past):
            if not _runs(self._entries[name].stored):
                self._drop(name)

    def _count_events(self) -> None:
        """Of what has ended in the background."""
        for name in list(self._running):
            entry = self._entries[name]
            if entry.stored.background is not None and not entry.stored.is_open:
                more = entry.stored.background.num_bytes
                self._entries[name] = entry._replace(num_bytes=entry.num_bytes + more)
                self._num_bytes += more
                self._running.discard(name)

    def _drop(self, name: str) -> None:
        self._running.discard(name)
        self._num_bytes -= self._entries.pop(name).num_bytes


def _runs(stored: Stored) -> bool:
    return stored.background is not None and stored.is_open
