"""Groups of hosts in one process, and ports for those in several."""

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from jinfercept.runner.hosts.group import HostGroup, meet
from jinfercept.runner.hosts.link import HostLink, Placement


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


def linked(num_hosts: int) -> list[tuple[HostLink, Mapping[int, bytes]]]:
    """What `meet` returns to each of some hosts."""
    port = free_port()
    with ThreadPoolExecutor(num_hosts) as pool:
        return [*pool.map(lambda i: meet(Placement("127.0.0.1", port, num_hosts, i), {}, "", 60.0), range(num_hosts))]


def groups(num_hosts: int, end: Callable[[int, str], None]) -> list[HostGroup]:
    """The hosts of a group, by their numbers; `end` is called instead of ending a process."""

    def ended(host_id: int) -> Callable[[str], None]:
        return lambda message: end(host_id, message)

    return [HostGroup(host_id, *ends, ended(host_id)) for host_id, ends in enumerate(linked(num_hosts))]
