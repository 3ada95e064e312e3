"""Limits on the number of open connections, and the file descriptors that they need."""

import logging
import sys
import time
from collections import Counter
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network
from typing import final

from jinfercept.errors import ConfigError

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 2048
"""Connections at once, unless the user says otherwise or the limit of open files is too low."""
BACKLOG = 1024
"""Connections that the kernel, or one turn of the event loop, may accept before they are counted, at most."""
_OTHER_FILES = 512
"""File descriptors for weights, logs and tools."""
_LOG_EVERY_S = 60.0


@final
class ConnectionLimits:
    """Counts the open connections of a server.

    Args:
        most_per_address: open connections of one client address; 0: no limit.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._open = 0
        self._per_network: Counter[str] = Counter()
        self._logged_s = -_LOG_EVERY_S

    def admit(self, address: str | None) -> bool:
        """Counts a connection, for which `release` has to be called; False: it exceeds a limit, and is not counted.

        Args:
            address: IP address of the client; None: a Unix socket.
        """
        network = _network(address)
        most = self._most_per_address
        if self._open >= self._most:
            self._log("--max-connections", self._most, "all clients")
        elif network is not None and 0 < most <= self._per_network[network]:
            self._log("--max-connections-per-address", most, network)
        else:
            self._open += 1
            if network is not None:
                self._per_network[network] += 1
            return True
        return False

    def release(self, address: str | None) -> None:
        """Uncounts an admitted connection that has ended."""
        network = _network(address)
        self._open -= 1
        if network is not None:
            self._per_network[network] -= 1
            if not self._per_network[network]:
                del self._per_network[network]

    def _log(self, flag: str, most: int, clients: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("connections are refused: %s have %d open already (%s)", clients, most, flag)


def _network(address: str | None) -> str | None:
    """The network that counts as one client: an IPv4 address, or the /64 of an IPv6 one; None: loopback, Unix socket."""
    if not address:
        return None
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return None
    return str(ip_network((ip, 64), strict=False) if isinstance(ip, IPv6Address) else ip)


def reserve_files(max_connections: int | None) -> tuple[int, int]:
    """Raises the process's soft limit of open files to the number that a server needs, or to the hard limit.

    Args:
        max_connections: connections that have to fit; None: `MOST_CONNECTIONS`, or as many as fit.

    Returns:
        Connections that may be open, and those that may be accepted before they are counted.

    Raises:
        ConfigError: the hard limit is too low for the given connections.
    """
    most = max_connections or MOST_CONNECTIONS
    if sys.platform == "win32":  # has no such limit
        return most, BACKLOG
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + BACKLOG + _OTHER_FILES
    for limit in (needed, hard):
        if soft != resource.RLIM_INFINITY and soft < limit:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                soft = limit
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most, BACKLOG
    room = soft - min(_OTHER_FILES, soft // 4)
    if max_connections is None:
        most = min(most, (room + 1) // 2)
        log.warning("at most %d connections at once: this process may open %d files (ulimit -Hn)", most, soft)
    elif most > (fitting := room * 3 // 4):
        raise ConfigError(
            "this process may not open as many files as its connections need",
            got=f"--max-connections {most}; the hard limit of open files is {soft}",
            fix=f"--max-connections of at most {fitting}, or raise the limit (ulimit -Hn)",
        )
    return most, min(BACKLOG, room - most)
