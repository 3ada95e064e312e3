"""Which hosts a tool may talk to, and at which addresses: private ones only for hosts that are named."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import final

from jinfercept.endpoints.calls import CallFailed


@final
class Hosts:
    """A list of hosts.

    Args:
        allowed: names, addresses, or `*.domain` for what is below a domain.
        named: whether the list was written as one: its names, but not its patterns, may be at private addresses.
    """

    def __init__(self, allowed: Sequence[str], *, named: bool) -> None:
        self._exact = {host.lower().strip("[]") for host in allowed if not host.startswith("*.")}
        self._below = tuple(host.lower()[1:] for host in allowed if host.startswith("*."))
        self._named = named

    def check(self, host: str) -> None:
        """Raise `CallFailed` for a host that is not on the list."""
        if host.lower() not in self._exact and not host.lower().endswith(self._below or ("\0",)):
            raise CallFailed(f"{host} is not among the hosts that this tool may talk to")

    async def address(self, host: str, port: int) -> str:
        """An address of a host that may be connected to. Raises `CallFailed` if it has none, `OSError` if nobody knows it.

        Whoever connects to what is returned talks to what was checked, whatever a name server says a moment later.
        """
        self.check(host)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in found]
        if self._named and host.lower() in self._exact:
            return addresses[0]
        for address in addresses:
            if is_public(address):
                return address
        raise CallFailed(f"{host} is at a private address; its name has to be in allow_hosts")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the whole internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return mapped.is_global and not mapped.is_multicast


def is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
