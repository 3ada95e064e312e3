"""Stored responses in memory: with an expiry, found only with their own key, and evicted fairly between keys (`Quota`)."""

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import final

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item
from jinfercept.quota import Quota
from jinfercept.server.state.response_rows import too_many_background
from jinfercept.server.state.stored_response import StoredResponse, measured

MOST_BYTES = 2**29


@final
class ResponseStore:
    """The stored responses of all owners. Times are seconds of any monotonic clock.

    Args:
        ttl_s: seconds until a response expires.
        most: maximum responses of all owners; of a response in the background only the events are ever evicted.
        most_bytes: maximum bytes of all owners.
        most_of_owner: maximum responses of one owner; None: no separate limit.
        most_bytes_of_owner: maximum bytes of one owner; None: no separate limit.
        most_background: maximum responses of one owner in the background at a time.
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
            pinned=lambda name: self._stored[name].is_pinned,
        )
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._open: dict[str, dict[str, StoredResponse]] = {}  # by owner: not settled yet
        self._items: dict[tuple[str, str], dict[str, Item]] = {}  # by owner and id, then by response, oldest first

    def __len__(self) -> int:
        return len(self._stored)

    def check_background(self, owner: str) -> None:
        """Raise 429 if an owner has the maximum of responses in the background."""
        running = sum(one.is_open and one.is_pinned for one in self._open.get(owner, {}).values())
        if running >= self._most_background:
            raise too_many_background(running, self._most_background)

    def add(self, stored: StoredResponse, now: float) -> None:
        """Store a new response. A response in the background is not evicted before it ends."""
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

    def restore(self, stored: StoredResponse, now: float) -> None:
        """Hold a final response that is stored elsewhere; its expiry is set."""
        if stored.name in self._stored:
            self._drop(self._stored[stored.name])
        stored.is_settled = True
        self._stored[stored.name] = stored
        self._quota.add(stored.owner, stored.name)
        self._index(stored, stored.asked)
        self._index_output(stored)
        self._hold(stored)
        self._shrink(stored.owner)

    def held(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of an owner, expired or not; None if it is not held."""
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def discard(self, response_id: str) -> None:
        """Hold a response no more."""
        if (stored := self._stored.get(response_id)) is not None:
            self._drop(stored)

    def charge(self, response_id: str, num_bytes: int) -> bool:
        """Count bytes of stored events; False, and not counted, if the quota of the owner has no room for them.

        Events of a response that is not stored are not counted. A negative number uncounts events.
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
        """Count and index the output of a final response. A response that is not stored is ignored."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._settle(stored)
            self._shrink(stored.owner)

    def has(self, response_id: str, owner: str, now: float) -> bool:
        """Whether a response of an owner is stored."""
        self._expire(now)
        stored = self._stored.get(response_id)
        return stored is not None and stored.owner == owner

    def get(self, response_id: str, owner: str, now: float) -> StoredResponse:
        """A response of an owner. Raises 404."""
        self._expire(now)
        stored = self.held(response_id, owner)
        if stored is None:
            raise no_response(response_id)
        return stored

    def items(self, item_ids: Collection[str], owner: str, now: float) -> dict[str, Item]:
        """Items of an owner's responses by their ids, the oldest one of each id; unknown ids are left out."""
        self._expire(now)
        if item_ids:
            self._index_open(owner)
        found = {item_id: known for item_id in item_ids if (known := self._items.get((owner, item_id)))}
        return {item_id: next(iter(known.values())) for item_id, known in found.items()}

    def delete(self, response_id: str, owner: str, now: float) -> StoredResponse:
        """Delete a response of an owner. Raises 404."""
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
            if not stored.is_pinned:
                self._drop(stored)

    def _shrink(self, owner: str) -> None:
        while (name := self._quota.victim(owner)) is not None:
            self._drop(self._stored[name])

    def _drop(self, stored: StoredResponse) -> None:
        del self._stored[stored.name]
        for item in [*stored.asked, *stored.response["output"]]:
            known = self._items.get((stored.owner, item["id"]), {})
            if known.pop(stored.name, None) is not None and not known:
                del self._items[stored.owner, item["id"]]
        self._close(stored)
        self._quota.remove(stored.owner, stored.name)
        self._release(stored)

    # -- index by id ---------------------------------------------------------------------------------------------------

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
        """Remove a response from the open ones, since its output is complete."""
        mine = self._open.get(stored.owner, {})
        if mine.pop(stored.name, None) is not None and not mine:
            del self._open[stored.owner]

    # -- bytes held ----------------------------------------------------------------------------------------------------

    def _charge(self, stored: StoredResponse, num_bytes: int) -> None:
        stored.num_bytes += num_bytes
        if stored.num_holders:
            self._quota.charge(stored.owner, num_bytes)

    def _hold(self, stored: StoredResponse) -> None:
        """Add a holder. A response with its first holder is counted, and holds the response that it continues."""
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


def no_response(response_id: str) -> ApiError:
    """Status 404, for a response that is not stored, or not for this key."""
    return ApiError(404, f"there is no response {response_id[:200]!r}", code="response_not_found")
