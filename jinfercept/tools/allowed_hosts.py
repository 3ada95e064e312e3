"""The hosts and ports that a tool may connect to, and their addresses: private ones only for hosts that are named."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple, final

import httpx2

from jinfercept.tools.calls import CallFailed

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


_DEFAULT_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(r"(?P<pattern>\*\.)?(?P<host>\[[^\[\]/?#@\\\s]*\]|[^\[\]:/?#@*\\\s]+)(:(?P<port>\d{1,5}))?")


class AllowedHost(NamedTuple):
    """An entry of a list of allowed hosts.

    Attributes:
        host: name or address as `host_key` writes it; of a pattern the domain.
        port: the only port that is allowed; None: the default port of the scheme, and the one that the tool's own URL names.
        is_pattern: whether all subdomains of the host are meant, and not the host.
    """

    host: str
    port: int | None
    is_pattern: bool

    @classmethod
    def parse(cls, entry: str) -> "AllowedHost":
        """An entry from `host`, `host:port`, or either behind `*.`. Raises `ValueError` for anything else."""
        match = _ENTRY.fullmatch(f"[{entry}]" if is_address(entry) and ":" in entry else entry)
        if match is None:
            raise ValueError("neither host nor host:port")
        port = None if match["port"] is None else int(match["port"])
        if port is not None and not 0 < port < 2**16:
            raise ValueError("a port is from 1 to 65535")
        return cls(host_key(match["host"]), port, match["pattern"] is not None)


@final
class Hosts:
    """A list of allowed hosts.

    Args:
        allowed: names, addresses, or `*.domain` for all subdomains, with or without a port.
        named: whether the list is explicit: then its names, but not its patterns, may be at private addresses.
        own_port: that the tool's own URL names; None: it names none.

    Raises:
        ValueError: an entry is no host.
    """

    def __init__(self, allowed: Sequence[str], *, named: bool, own_port: int | None = None) -> None:
        self._entries = [AllowedHost.parse(entry) for entry in allowed]
        self._named, self._own_port = named, own_port

    def _check(self, host: str, port: int, scheme: str) -> AllowedHost:
        """The entry that allows a host and its port, one without a pattern if there is one. Raises `CallFailed`."""
        key = host_key(host)
        same = [entry for entry in self._entries if entry.host == key and not entry.is_pattern]
        same += [entry for entry in self._entries if entry.is_pattern and key.endswith(f".{entry.host}")]
        if not same:
            raise CallFailed(f"{host} is not among the hosts that this tool may talk to")
        for entry in same:
            if port == entry.port or (entry.port is None and port in (_DEFAULT_PORTS[scheme], self._own_port)):
                return entry
        raise CallFailed(f"port {port} of {host} is not among those that this tool may talk to")

    async def address(self, host: str, port: int, scheme: str = "http") -> str:
        """An allowed address of a host. Raises `CallFailed` if it has none, `OSError` if it cannot be resolved.

        Connect to the returned address: the name may resolve to another one later.

        Args:
            host: name or address.
        """
        entry = self._check(host, port, scheme)
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in infos]
        if self._named and not entry.is_pattern:
            return addresses[0]
        for address in addresses:
            if is_public(address):
                return address
        raise CallFailed(f"{host} is at a private address; its name has to be in allow_hosts")


def host_key(host: str) -> str:
    """A host as it is compared: lower case, ASCII, no dot at the end; an address in its shortest form.

    Raises:
        ValueError: it is none.
    """
    host = host.strip("[]").lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        key = httpx2.URL(scheme="http", host=host).raw_host.decode("ascii").removesuffix(".")
    except httpx2.InvalidURL as error:
        raise ValueError(str(error)) from error
    if not key:
        raise ValueError("no host")
    return key


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
