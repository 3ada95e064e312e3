"""Groups of hosts in one process, and ports for those in several."""

import socket
from collections.abc import Callable

from jinfercept.hosts.group import HostGroup
from jinfercept.hosts.link import HostLink


def free_port() -> int:
    """A port that is free, as is the one above it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def linked() -> tuple[HostLink, HostLink]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return HostLink(near), HostLink(listener.accept()[0])


def groups(num_hosts: int, end: Callable[[int, str], None]) -> list[HostGroup]:
    """The hosts of a group, by their numbers; `end` is called instead of ending a process."""
    pairs = {host_id: linked() for host_id in range(1, num_hosts)}

    def ended(host_id: int) -> Callable[[str], None]:
        return lambda message: end(host_id, message)

    first = HostGroup(0, {host_id: near for host_id, (near, _) in pairs.items()}, ended(0))
    return [first, *(HostGroup(host_id, {0: far}, ended(host_id)) for host_id, (_, far) in pairs.items())]
