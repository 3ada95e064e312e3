"""Entries of several tenants in one table, each until some time after its last use."""

import threading
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple, final

from jinfercept.tenants.quota import Quota


class _Entry[T](NamedTuple):
    tenant: str
    value: T
    num_bytes: int
    until_s: float


@final
class ExpiringEntries[T]:
    """Entries by name, of tenants that share a quota. Thread-safe.

    Args:
        quota: of nothing else; the tenant with the most loses its least recently used entry first.
        max_age_s: seconds until an entry expires, since its last use.
        now: a monotonic clock.
    """

    def __init__(self, quota: Quota, max_age_s: float, now: Callable[[], float]) -> None:
        self._quota, self._max_age_s, self._now = quota, max_age_s, now
        self._entries: dict[str, _Entry[T]] = {}  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            return sum(entry.num_bytes for entry in self._entries.values())

    def peek(self, name: str) -> T | None:
        """An entry, expired or not, which is not a use of it."""
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
        """Remove an entry if there is one."""
        with self._lock:
            self._remove(name)

    def _put(self, name: str, entry: _Entry[T]) -> None:
        self._remove(name)
        now, tenant = self._now(), entry.tenant
        self._entries[name] = entry._replace(until_s=now + self._max_age_s)
        self._quota.add(tenant, name)
        self._quota.charge(tenant, entry.num_bytes)
        for old in list(takewhile(lambda old: self._entries[old].until_s <= now, self._entries)):
            self._remove(old)
        while (victim := self._quota.victim(tenant)) is not None:
            self._remove(victim)

    def _remove(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self._quota.remove(entry.tenant, name)
            self._quota.charge(entry.tenant, -entry.num_bytes)
