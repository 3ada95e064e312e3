"""A clock that follows the wall clock, but for a leap ahead that has not lasted yet: entries expire by it."""

import time
from collections.abc import Callable
from typing import final

_LEAP_S = 60.0
"""Seconds by which the wall clock may gain on a monotonic one."""
_DOWN_S = 3600.0
"""Seconds by which it may be ahead of a time that was stored before this process began."""
_LASTING_S = 3600.0
"""Seconds after which a leap ahead counts as the right time: the machine slept, or no server was running."""


@final
class TrustedClock:
    """The clock of one process. A wall clock that is wrong for a while, at a start too, makes nothing older than it is.

    Args:
        stored_s: a time that an earlier process has trusted, in seconds since 1970; None if unknown.
        monotonic: seconds.
    """

    def __init__(self, stored_s: float | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stored_s, self._monotonic = stored_s, monotonic
        self._offset_s: float | None = None  # from monotonic to trusted time
        self._leapt_s: float | None = None  # when the wall clock was found ahead, monotonic

    def read(self, wall_s: float) -> float:
        """The trusted time.

        Args:
            wall_s: time of the wall clock.
        """
        now = self._monotonic()
        if self._offset_s is None:
            trusted_s, most_s = wall_s if self._stored_s is None else self._stored_s, _DOWN_S
        else:
            trusted_s, most_s = now + self._offset_s, _LEAP_S
        if wall_s - trusted_s <= most_s:
            self._leapt_s = None
        elif self._leapt_s is None:
            self._leapt_s = now
        if self._leapt_s is None or now - self._leapt_s >= _LASTING_S:
            trusted_s, self._leapt_s = wall_s, None
        self._offset_s = trusted_s - now
        return trusted_s
