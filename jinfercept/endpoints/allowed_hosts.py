"""The hosts that a tool may connect to, and their addresses: private ones only for hosts that are named."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import final

from jinfercept.endpoints.calls import CallFailed

_UNICAST = IPv6Network("2000::/3")  # all allocated IPv6 addresses, except embedded IPv4 addresses
_EMBEDDING = tuple(
    IPv6Network(network)
    for network in (
        "::ffff:0:0/96",  # IPv4-mapped
        "::/96",  # IPv4-compatible, deprecated
        "::ffff:0:0:0/96",  # IPv4-translated (RFC 2765)
        "64:ff9b::/96",  # NAT64 (RFC 6052)
    )
)
_ISATAP = (0x5EFE, 0x2005EFE)  # before the IPv4 address (RFC 5214)
_LOCAL: tuple[IPv4Network | IPv6Network, ...] = (  # `is_global` is True for some addresses of these
    IPv4Network("192.0.0.0/24"),  # answered by the nearest gateway
    IPv4Network("192.88.99.0/24"),  # the nearest 6to4 relay
    IPv6Network("2001::/32"),  # Teredo
    IPv6Network("3fff::/20"),  # documentation (RFC 9637)
)


@final
class Hosts:
    """A list of allowed hosts.

    Args:
        allowed: names, addresses, or `*.domain` for all subdomains.
        named: whether the list is explicit: then its names, but not its patterns, may be at private addresses.
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
        """An allowed address of a host. Raises `CallFailed` if it has none, `OSError` if it cannot be resolved.

        Connect to the returned address: the name may resolve to another one later.
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
    """Whether an IP address is public. An IPv6 address that embeds an IPv4 address is public if the embedded one is."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        low = IPv4Address(int(parsed) & 0xFFFFFFFF)
        if any(parsed in network for network in _EMBEDDING):
            return is_public(str(low))
        tunnelled = low if int(parsed) >> 32 & 0xFFFFFFFF in _ISATAP else parsed.sixtofour
        if parsed not in _UNICAST or (tunnelled is not None and not is_public(str(tunnelled))):
            return False
    return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _LOCAL)


def is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
