"""Which of how many processes this one is, and where host 0 is."""

from dataclasses import dataclass

from jinfercept.config import HostOptions
from jinfercept.errors import ConfigError

TOKEN_VARIABLE = "JINFERCEPT_HOSTS_TOKEN"
"""The environment variable with the secret that all hosts share."""
PLANS_PORT = 1
"""Added to the coordinator's port: there host 0 sends its plans."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of a group of hosts; host 0 has the address.

    Attributes:
        port: JAX's coordination service listens there on host 0; host 0 itself listens `PLANS_PORT` above it.
        host_id: counted from 0.
    """

    address: str
    port: int
    num_hosts: int
    host_id: int

    @property
    def coordinator(self) -> str:
        return self._at(self.port)

    @property
    def plans_address(self) -> str:
        return self._at(self.port + PLANS_PORT)

    def _at(self, port: int) -> str:
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


def place(options: HostOptions) -> Placement | None:
    """Where this process belongs; None if no option asks for several hosts. Raises `ConfigError` if one lacks or is wrong."""
    address, num_hosts, host_id = options.coordinator, options.num_hosts, options.host_id
    if (address, num_hosts, host_id) == (None, None, None):
        return None
    if address is None or num_hosts is None or host_id is None:
        fix = "give --coordinator HOST:PORT, --num-hosts N and --host-id I"
        raise ConfigError("several hosts need three options", got="one or two of them", fix=fix)
    if not 0 <= host_id < num_hosts:
        raise ConfigError(
            "--host-id must be below --num-hosts", got=f"host {host_id} of {num_hosts}", fix="count from 0"
        )
    host, port = split_address(address)
    return Placement(host, port, num_hosts, host_id)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[ADDRESS]:PORT`. Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536 - PLANS_PORT:
        raise ConfigError(
            "--coordinator must be the address and a port of host 0",
            got=text,
            fix=f"HOST:PORT with a port up to {65_535 - PLANS_PORT}",
        )
    return host, int(port)
