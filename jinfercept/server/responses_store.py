"""Stored responses, in memory: each for a while, found only with its own key, and dropped fairly between keys (`Quota`).

A response holds what was asked and answered in it, and refers to the one that it goes on from: conversations share their
beginnings. Bytes count once per key for as long as any stored response needs them.
"""

from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol, final

from jinfercept.quota import Quota, num_bytes_of
from jinfercept.server.errors import ApiError
from jinfercept.server.responses_items import Item

MOST_BYTES = 2**29
_INDEX_BYTES = 400
"""Of an item that is found by its id, beside the item itself."""
_OPEN = ("queued", "in_progress")
_RETRY_S = 1


class BackgroundRuns(Protocol):
    """A response that is written without a client that waits for it."""

    async def cancel(self) -> None:
        """Stop writing; the response is final afterwards."""
        ...

    def follow(self, start: int) -> AsyncGenerator[bytes]:
        """Its events from one on. Raises 400 if they were not kept."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class StoredResponse:
    """A response and what it answers. The last five attributes are the store's.

    Attributes:
        owner: the key that it was asked with.
        response: as it stands; its writer changes it.
        previous: the response that it goes on from, which is final; None if it begins a conversation.
        asked: what was said to it, after `previous`.
        background: its writer, if no client waits for it.
        num_before: items of the conversation up to `asked`.
        num_bytes: what it holds in memory: `response` as it begins and `asked` at first; later events and output too.
        num_holders: 1 if it is stored, and 1 for each response in memory that goes on from it.
        num_indexed: leading items of the output that are found by their ids.
        is_settled: whether the output is whole and counted.
        until_s: when it expires.
    """

    owner: str
    response: dict[str, Any]
    previous: "StoredResponse | None"
    asked: Sequence[Item]
    background: BackgroundRuns | None = None
    num_bytes: int = 0
    num_before: int = field(init=False)
    num_holders: int = field(init=False, default=0)
    num_indexed: int = field(init=False, default=0)
    is_settled: bool = field(init=False, default=False)
    until_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_before = 0 if self.previous is None else self.previous.num_items

    @property
    def name(self) -> str:
        """The response's id."""
        return self.response["id"]

    @property
    def is_open(self) -> bool:
        """Whether it still changes."""
        return self.response["status"] in _OPEN

    @property
    def num_items(self) -> int:
        """Items of the conversation, its own output included."""
        return self.num_before + len(self.asked) + len(self.response["output"])

    @property
    def before(self) -> list[Item]:
        """The conversation up to `asked`."""
        return [] if self.previous is None else self.previous.conversation

    @property
    def conversation(self) -> list[Item]:
        """All that a follow-up goes on from."""
        parts: list[Sequence[Item]] = []
        one: StoredResponse | None = self
        while one is not None:
            parts += one.response["output"], one.asked
            one = one.previous
        return [item for part in reversed(parts) for item in part]


@final
class ResponseStore:
    """Times are seconds of any clock that does not go back.

    Args:
        ttl_s: for which one is stored.
        most: responses of all owners together; of one in the background only the events are ever dropped.
        most_bytes: that all of them hold.
        most_of_owner: responses of one owner; None: no more than `most`.
        most_bytes_of_owner: that those of one owner hold; None: no more than `most_bytes`.
        most_background: responses of one owner that are in the background at a time.
    """

    def __init__(
        self,
        ttl_s: float,
        most: int,
        most_bytes: int = MOST_BYTES,
        *,
        most_of_owner: int | None = None,
        most_bytes_of_owner: int | None = None,
        most_background: int = 128,
    ) -> None:
        self._ttl_s, self._most_background = ttl_s, most_background
        self._quota = Quota(
            most,
            most_bytes,
            most_of_owner=most_of_owner,
            most_bytes_of_owner=most_bytes_of_owner,
            pinned=lambda name: _is_pinned(self._stored[name]),
        )
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._open: dict[str, dict[str, StoredResponse]] = {}  # by owner: those whose output may still grow
        self._items: dict[tuple[str, str], dict[str, Item]] = {}  # by owner and id, then by response, oldest first

    def __len__(self) -> int:
        return len(self._stored)

    def check_background(self, owner: str) -> None:
        """Raise 429 if an owner has as many responses in the background as it may."""
        running = sum(one.is_open and _is_pinned(one) for one in self._open.get(owner, {}).values())
        if running >= self._most_background:
            raise ApiError(
                429,
                f"{running} responses of this key are in the background, {self._most_background} may be",
                param="background",
                code="too_many_background_responses",
                headers={"Retry-After": f"{_RETRY_S}"},
            )

    def add(self, stored: StoredResponse, now: float) -> None:
        """Store one that is new. What runs in the background is not dropped."""
        self._expire(now)
        if stored.previous is not None:
            self._settle(stored.previous)
        self._index_open(stored.owner)
        stored.until_s = now + self._ttl_s
        self._stored[stored.name] = stored
        self._open.setdefault(stored.owner, {})[stored.name] = stored
        self._quota.add(stored.owner, stored.name)
        self._index(stored, stored.asked)
        self._hold(stored)
        self._shrink(stored.owner)

    def charge(self, response_id: str, num_bytes: int) -> bool:
        """Count events that are kept of a response; False, and not counted, if its owner has no room for them.

        Those of a response that is not stored any more are not counted. A negative number counts them no more.
        """
        stored = self._stored.get(response_id)
        if stored is None:
            return True
        self._charge(stored, num_bytes)
        self._shrink(stored.owner)
        fits = num_bytes < 0 or not self._quota.is_over(stored.owner)
        if not fits:
            self._charge(stored, -num_bytes)
        return fits

    def settle(self, response_id: str) -> None:
        """A response is final: its output is counted and found. One that is not stored is ignored."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._settle(stored)
            self._shrink(stored.owner)

    def get(self, response_id: str, owner: str, now: float) -> StoredResponse:
        """One of the owner's; raises 404."""
        self._expire(now)
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"there is no response {response_id[:200]!r}", code="response_not_found")
        return stored

    def items(self, item_ids: Collection[str], owner: str, now: float) -> dict[str, Item]:
        """Items of the owner's responses by their ids, the oldest of each id; raises 404."""
        self._expire(now)
        if item_ids:
            self._index_open(owner)
        found: dict[str, Item] = {}
        for item_id in item_ids:
            known = self._items.get((owner, item_id))
            if known is None:
                raise ApiError(404, f"there is no item {item_id[:200]!r}", param="input", code="item_not_found")
            found[item_id] = next(iter(known.values()))
        return found

    def delete(self, response_id: str, owner: str, now: float) -> StoredResponse:
        """Store it no longer; raises 404."""
        stored = self.get(response_id, owner, now)
        self._drop(stored)
        return stored

    def _settle(self, stored: StoredResponse) -> None:
        if stored.is_settled:
            return
        stored.is_settled = True
        if stored.name in self._stored:
            self._index_output(stored)
            self._close(stored)
        self._charge(stored, measured(stored.response["output"]))

    def _expire(self, now: float) -> None:
        past = takewhile(lambda stored: stored.until_s <= now, self._stored.values())
        for stored in list(past):
            if not _is_pinned(stored):
                self._drop(stored)

    def _shrink(self, owner: str) -> None:
        while (name := self._quota.victim(owner)) is not None:
            self._drop(self._stored[name])

    def _drop(self, stored: StoredResponse) -> None:
        del self._stored[stored.name]
        for item in _own_items(stored):
            known = self._items.get((stored.owner, item["id"]), {})
            if known.pop(stored.name, None) is not None and not known:
                del self._items[stored.owner, item["id"]]
        self._close(stored)
        self._quota.remove(stored.owner, stored.name)
        self._release(stored)

    # -- found by id ---------------------------------------------------------------------------------------------------

    def _index(self, stored: StoredResponse, items: Sequence[Item]) -> None:
        for item in items:
            self._items.setdefault((stored.owner, item["id"]), {}).setdefault(stored.name, item)

    def _index_output(self, stored: StoredResponse) -> None:
        output = stored.response["output"]
        self._index(stored, output[stored.num_indexed :])
        stored.num_indexed = len(output)

    def _index_open(self, owner: str) -> None:
        for stored in self._open.get(owner, {}).values():
            self._index_output(stored)

    def _close(self, stored: StoredResponse) -> None:
        """Its output grows no more."""
        mine = self._open.get(stored.owner, {})
        if mine.pop(stored.name, None) is not None and not mine:
            del self._open[stored.owner]

    # -- what is held --------------------------------------------------------------------------------------------------

    def _charge(self, stored: StoredResponse, num_bytes: int) -> None:
        stored.num_bytes += num_bytes
        if stored.num_holders:
            self._quota.charge(stored.owner, num_bytes)

    def _hold(self, stored: StoredResponse) -> None:
        """It is needed once more; what is needed for the first time counts, and needs what it goes on from."""
        one: StoredResponse | None = stored
        while one is not None:
            one.num_holders += 1
            if one.num_holders > 1:
                return
            self._quota.charge(one.owner, one.num_bytes)
            one = one.previous

    def _release(self, stored: StoredResponse) -> None:
        one: StoredResponse | None = stored
        while one is not None:
            one.num_holders -= 1
            if one.num_holders:
                return
            self._quota.charge(one.owner, -one.num_bytes)
            one = one.previous


def measured(items: Sequence[Item], response: Any = None) -> int:
    """Bytes that stored items, and a response, hold in memory. Takes a microsecond for each text in them.

    Reports of log probabilities are many and alike: of those of a text one is measured.
    """
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    reports = [part["logprobs"] for part in parts if part.get("logprobs")]
    num_bytes = len(items) * _INDEX_BYTES + sum(len(some) * num_bytes_of(some[0]) for some in reports)
    return num_bytes + num_bytes_of([*items, response], without=reports)


def _own_items(stored: StoredResponse) -> Iterator[Item]:
    yield from stored.asked
    yield from stored.response["output"]


def _is_pinned(stored: StoredResponse) -> bool:
    """Whether it is written in the background: its last event may not be there when it is final."""
    return stored.background is not None and not stored.is_settled
