"""The responses in the background that this process generates or has generated, with their events for clients that stream them.

Their number and the bytes of their events are limited; tenants share both fairly.
"""

import asyncio
from collections.abc import Callable
from typing import final

from jinfercept.state.stored_response import StoredResponse
from jinfercept.tenants.quota import Quota

_MOST_RUNS, _MOST_EVENT_BYTES = 4096, 2**27
"""Maximum responses whose events are kept, and bytes of these events."""


@final
class BackgroundEvents:
    """Responses by id, the oldest first. All methods run on the event loop.

    Args:
        ttl_s: seconds until a response expires.
        is_open: whether a response is generated now: its events stay.
    """

    def __init__(self, ttl_s: float, is_open: Callable[[str], bool]) -> None:
        self._ttl_s = ttl_s
        self._runs: dict[str, StoredResponse] = {}
        self._events = Quota(_MOST_RUNS, _MOST_EVENT_BYTES, pinned=is_open)

    def get(self, response_id: str) -> StoredResponse | None:
        """A response whose events are kept; None if they are not."""
        return self._runs.get(response_id)

    def add(self, stored: StoredResponse) -> None:
        """Keep the events of a response from now on."""
        now = asyncio.get_running_loop().time()
        while self._runs and (oldest := next(iter(self._runs.values()))).until_s <= now:
            self.forget(oldest.name)
        stored.until_s = now + self._ttl_s
        self._runs[stored.name] = stored
        self._events.add(stored.tenant, stored.name)
        self._shrink(stored.tenant)

    def charge(self, response_id: str, num_bytes: int) -> bool:
        """Count bytes of the events of a response; False, and not counted, if there is no room for them.

        Events of a response that is deleted are not counted. A negative number uncounts events.
        """
        stored = self._runs.get(response_id)
        if stored is None:
            return True
        self._charge(stored, num_bytes)
        self._shrink(stored.tenant)
        fits = num_bytes < 0 or not self._events.is_over(stored.tenant)
        if not fits:
            self._charge(stored, -num_bytes)
        return fits

    def forget(self, response_id: str) -> None:
        """Keep the events of a response no more."""
        if (stored := self._runs.pop(response_id, None)) is not None:
            self._events.remove(stored.tenant, response_id)
            self._charge(stored, -stored.event_bytes)

    def _charge(self, stored: StoredResponse, num_bytes: int) -> None:
        stored.event_bytes += num_bytes
        self._events.charge(stored.tenant, num_bytes)

    def _shrink(self, tenant: str) -> None:
        while (name := self._events.victim(tenant)) is not None:
            self.forget(name)
