"""A clock that follows the wall clock, but for a leap ahead that has not lasted yet: rows expire by it."""

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
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_s: float | None = None  # from monotonic to trusted time
        self._leapt_s: float | None = None  # when the wall clock was found ahead, monotonic

    @property
    def has_begun(self) -> bool:
        """Whether the wall clock has been read."""
        return self._offset_s is not None

    def read(self, wall_s: float, stored_s: float | None = None) -> float:
        """The trusted time.

        Args:
            wall_s: time of the wall clock.
            stored_s: a time that a process has trusted before; None if unknown.
        """
        now = self._monotonic()
        if self._offset_s is None:
            trusted_s, most_s = wall_s if stored_s is None else stored_s, _DOWN_S
        else:
            trusted_s, most_s = now + self._offset_s, _LEAP_S
            if stored_s is not None and trusted_s < stored_s <= wall_s:
                trusted_s = stored_s
        if wall_s - trusted_s > most_s:
            self._leapt_s = now if self._leapt_s is None else self._leapt_s
        else:
            self._leapt_s = None
        if self._leapt_s is None or now - self._leapt_s >= _LASTING_S:
            trusted_s, self._leapt_s = wall_s, None
        self._offset_s = trusted_s - now
        return trusted_s
