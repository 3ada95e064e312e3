"""Turns at starting: the replicas of one machine load and measure one after the other.

A profile that is measured while another replica starts on the same machine would be wrong, and executables that the first
replica has compiled are in the cache for the others.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from jinfercept.models.embedded import cache_directory


@contextmanager
def start_turn(secret: bytes) -> Iterator[bool]:
    """Hold this machine's turn at starting.

    Args:
        secret: of the fleet, new for each start of one.

    Yields:
        Whether no other replica of the fleet has started on this machine before.
    """
    try:
        import fcntl  # POSIX

        folder = cache_directory() / "fleet"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "start").open("a+")
    except (ImportError, OSError):  # read-only, or another system: all start at once
        yield True
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        name = hashlib.sha256(secret).hexdigest()
        file.seek(0)
        first = file.read() != name
        yield first
        with suppress(OSError):
            file.seek(0)
            file.truncate()
            file.write(name)
