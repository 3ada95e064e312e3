"""A limit of entries and bytes that several tenants share, with max-min fairness between them.

The tenants of a server are its API keys. While the total is over the limit, the tenant that holds the most drops its oldest
entry. A tenant that holds no more than an equal share drops nothing.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, final

UNLIMITED = 2**63


@final
class Quota[N]:
    """Counts entries and bytes by tenant, with limits for all together and for the entries of one tenant."""

    def __init__(self, most: int, most_bytes: int = UNLIMITED, *, most_of_tenant: int | None = None) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._most_of_tenant = UNLIMITED if most_of_tenant is None else most_of_tenant
        self._entries: dict[str, dict[N, int]] = {}  # bytes by name, oldest first, of tenants that have some
        self._bytes: dict[str, int] = {}  # of each of these tenants
        self._num_entries = self.num_bytes = 0

    def add(self, tenant: str, name: N, num_bytes: int = 0) -> None:
        """Count an entry as the tenant's youngest, whether it is new or not."""
        if name in self._entries.get(tenant, ()):
            self.remove(tenant, name)
        self._entries.setdefault(tenant, {})[name] = num_bytes
        self._count(tenant, 1, num_bytes)

    def remove(self, tenant: str, name: N) -> None:
        self._count(tenant, -1, -self._entries[tenant].pop(name))
        if not self._entries[tenant]:  # it takes no share
            del self._entries[tenant], self._bytes[tenant]

    def victim(self, tenant: str) -> N | None:
        """Name of the entry to drop next, after a change of this tenant's entries; None once all fit."""
        own = self._entries.get(tenant, {})
        if len(own) > self._most_of_tenant:
            return next(iter(own))
        holder = None  # the one that holds the most: more than an equal share, if together they hold too much
        if self._num_entries > self._most:
            holder = max(self._entries, key=lambda tenant: len(self._entries[tenant]))
        elif self.num_bytes > self._most_bytes:
            holder = max(self._bytes, key=self._bytes.__getitem__)
        return None if holder is None else next(iter(self._entries[holder]))

    def _count(self, tenant: str, number: int, num_bytes: int) -> None:
        self._num_entries += number
        self.num_bytes += num_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes


class _Entry[T](NamedTuple):
    tenant: str
    value: T
    num_bytes: int
    until_s: float


@final
class ExpiringEntries[T]:
    """Entries by name, of tenants that share a quota. Thread-safe. The clock `now` is monotonic.

    An entry expires `max_age_s` after its last use. Beyond the quota, the tenant with the most entries loses its least
    recently used one.
    """

    def __init__(self, quota: Quota[str], max_age_s: float, now: Callable[[], float]) -> None:
        self._quota, self._max_age_s, self._now = quota, max_age_s, now
        self._entries: dict[str, _Entry[T]] = {}  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._quota.num_bytes

    def peek(self, name: str) -> T | None:
        """An entry, expired or not; this does not count as a use."""
        entry = self._entries.get(name)
        return None if entry is None else entry.value

    def use(self, name: str) -> T | None:
        """An entry that has not expired; it is the most recent one now."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.until_s <= self._now():
                return None
            self._put(name, entry)
            return entry.value

    def put(self, tenant: str, name: str, value: T, num_bytes: int) -> None:
        """Make an entry the most recent one, and remove expired entries and those beyond the limits."""
        with self._lock:
            self._put(name, _Entry(tenant, value, num_bytes, 0.0))

    def remove(self, name: str) -> None:
        with self._lock:
            self._remove(name)

    def _put(self, name: str, entry: _Entry[T]) -> None:
        self._remove(name)
        now, tenant = self._now(), entry.tenant
        self._entries[name] = entry._replace(until_s=now + self._max_age_s)
        self._quota.add(tenant, name, entry.num_bytes)
        for old in list(takewhile(lambda old: self._entries[old].until_s <= now, self._entries)):
            self._remove(old)
        while (victim := self._quota.victim(tenant)) is not None:
            self._remove(victim)

    def _remove(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self._quota.remove(entry.tenant, name)


@dataclass(slots=True)
class _TenantWork:
    running: int = 0  # slots
    # in order of arrival
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict[asyncio.Future[None], None])


@final
class FairSlots:
    """Slots in which tenants take turns, at most `most_of_tenant` each. Belongs to one event loop.

    A free slot goes to the tenant with the fewest slots; of several, to the one whose last work began or ended longest ago;
    and there to the oldest work.
    """

    def __init__(self, slots: int, most_of_tenant: int | None = None) -> None:
        self._free, self._most_of_tenant = slots, slots if most_of_tenant is None else most_of_tenant
        self._tenants: dict[str, _TenantWork] = {}  # with slots or waiting; last the one whose work began or ended last

    async def begin(self, tenant: str) -> None:
        """Wait for a slot and take it. Work that is cancelled while it waits takes none."""
        work = self._tenants.setdefault(tenant, _TenantWork())
        if self._free and work.running < self._most_of_tenant:
            self._take(tenant)
            return
        place = asyncio.get_running_loop().create_future()
        work.waiting[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(tenant, place)
            else:  # it has a slot already
                self.end(tenant)
            raise

    def end(self, tenant: str) -> None:
        self._free += 1
        self._count(tenant, -1)
        self._next()

    def close(self, error: Exception) -> None:
        """Fail all waiting work."""
        for work in self._tenants.values():
            for place in work.waiting:
                if not place.done():
                    place.set_exception(error)
            work.waiting.clear()

    def _next(self) -> None:
        while (tenant := self._whose_turn()) is not None:
            waiting = self._tenants[tenant].waiting
            place = next(iter(waiting))
            del waiting[place]
            if not place.cancelled():
                self._take(tenant)
                place.set_result(None)
                return

    def _whose_turn(self) -> str | None:
        may_begin = (
            tenant for tenant, work in self._tenants.items() if work.waiting and work.running < self._most_of_tenant
        )
        return min(may_begin, key=lambda tenant: self._tenants[tenant].running, default=None)

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._count(tenant, 1)

    def _count(self, tenant: str, change: int) -> None:
        work = self._tenants.pop(tenant)
        work.running += change
        if work.running or work.waiting:
            self._tenants[tenant] = work

    def _leave(self, tenant: str, place: asyncio.Future[None]) -> None:
        if (work := self._tenants.get(tenant)) is not None:
            work.waiting.pop(place, None)
            if not work.running and not work.waiting:
                del self._tenants[tenant]
