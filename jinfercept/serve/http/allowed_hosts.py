"""Names by which clients may reach a server: those of this machine, IP addresses, and those of a list.

A web page can have its own name resolved to any address (DNS rebinding); its requests then name a host of its own, and are
otherwise like those of the server's own pages.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import final

from jinfercept.errors import ConfigError, shown

_PATTERN = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[^\[\]]+)?\]|[A-Za-z0-9._-]+)(?::[0-9]*)?")
"""A name or an address, IPv6 in brackets, and a port (RFC 9110, 7.2)."""
_ALL = "*"


@final
class AllowedHosts:
    """Decides about values of the header `Host`. `localhost`, names below it and IP addresses are always allowed.

    `*.` before a name allows its subdomains, `*` all names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        canonical = {_canonical(name) for name in names}
        self._all = _ALL in canonical
        self._names = canonical | {"localhost"}
        self._suffixes = (".localhost", *(name[1:] for name in canonical if name.startswith("*.")))

    def allows(self, host: str) -> bool:
        """Whether a request may name a host, with or without a port."""
        if self._all:
            return True
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = _canonical(parts[1])
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def check_allowed_hosts(names: Iterable[str]) -> None:
    """Raise `ConfigError` for a name that is none, or has more than a name."""
    for name in names:
        if name != _ALL and not _PATTERN.fullmatch(name) and not _is_address(name) and not _is_address(f"[{name}]"):
            raise ConfigError(
                "a name in allowed_hosts is no host name",
                got=shown(name),
                fix="a name without scheme, path and port, such as llm.example.org, *.example.org, or * for all",
            )


def _canonical(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        IPv6Address(host[1:-1]) if host.startswith("[") else IPv4Address(host)
    except ValueError:
        return False
    return True
