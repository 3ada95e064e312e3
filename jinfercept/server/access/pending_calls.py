"""Limits the asynchronous calls that run at once for the requests of one key."""

import threading
from collections import Counter
from typing import final


@final
class PendingCalls:
    """The asynchronous calls that run, by key. Thread-safe.

    Args:
        most: limit of the calls of one key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = Counter[str]()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Calls of all keys."""
        with self._lock:
            return self._numbers.total()

    def of(self, tenant: str) -> "PendingCallsOfKey":
        """The limit of one key, an `hooks.SharedLimit`."""
        return PendingCallsOfKey(self, tenant)

    def change(self, tenant: str, number: int) -> bool:
        """Count more or fewer calls of a key; False, and nothing is changed, if there would be too many."""
        with self._lock:
            after = self._numbers[tenant] + number
            if number > 0 and after > self._most:
                return False
            self._numbers[tenant] = after
            if not after:
                del self._numbers[tenant]
            return True


@final
class PendingCallsOfKey:
    """The limit of one key."""

    def __init__(self, calls: PendingCalls, tenant: str) -> None:
        self._calls, self._tenant = calls, tenant

    def take(self) -> bool:
        """Count one more call; False, and nothing is counted, if there are too many."""
        return self._calls.change(self._tenant, 1)

    def release(self, number: int = 1) -> None:
        """Uncount calls that have ended."""
        self._calls.change(self._tenant, -number)
