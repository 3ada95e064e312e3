"""Which of how many processes this one is, and where host 0 is: from options, from Slurm's or from Kubernetes' variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jinfercept.config import HostOptions
from jinfercept.errors import ConfigError

TOKEN_VARIABLE = "JINFERCEPT_HOSTS_TOKEN"
"""The environment variable with the secret that all hosts share."""
PLANS_PORT = 1
"""Added to the coordinator's port: there host 0 sends its plans."""
_SLURM_PORTS = (61_440, 4_096)
"""The ports of Slurm jobs: the first, and how many."""
_KUBERNETES_PORT = 5_000


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of a group.

    Attributes:
        address: name or address of host 0.
        port: JAX's coordination service listens there on host 0, and `PLANS_PORT` above it host 0 for the others.
        host_id: this one's number, from 0.
    """

    address: str
    port: int
    num_hosts: int
    host_id: int

    @property
    def coordinator(self) -> str:
        """Address and port for JAX."""
        return self._at(self.port)

    @property
    def plans_address(self) -> str:
        """Address and port for plans."""
        return self._at(self.port + PLANS_PORT)

    def _at(self, port: int) -> str:
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


@dataclass(frozen=True, slots=True)
class Found:
    """The values of a cluster's variables; None: not set."""

    cluster: str = "no cluster"
    coordinator: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None


def place(options: HostOptions, environment: Mapping[str, str], full_name: str) -> Placement | None:
    """Where this process belongs; None if no option asks for several hosts.

    Args:
        options: as they were given. What they leave open is taken from the cluster's variables.
        full_name: of this machine, with its domain.

    Raises:
        ConfigError: a number or the address is missing, wrong, or not what the cluster says.
    """
    values = (options.coordinator, options.num_hosts, options.host_id)
    if values == (None, None, None):
        return None
    in_environment = in_cluster(environment, full_name)
    address = in_environment.coordinator if options.coordinator in (None, "auto") else options.coordinator
    num_hosts = in_environment.num_hosts if options.num_hosts is None else options.num_hosts
    host_id = in_environment.host_id if options.host_id is None else options.host_id
    if address is None or num_hosts is None or host_id is None:
        names = ("--coordinator", "--num-hosts", "--host-id")
        missing = [name for name, value in zip(names, (address, num_hosts, host_id), strict=True) if value is None]
        raise ConfigError(
            f"several hosts need {' and '.join(missing)}",
            got=f"neither an option nor a variable of {in_environment.cluster}",
            fix="give --coordinator HOST:PORT, --num-hosts N and --host-id I",
        )
    for name, given_value, stated_value in (
        ("--num-hosts", options.num_hosts, in_environment.num_hosts),
        ("--host-id", options.host_id, in_environment.host_id),
    ):
        if given_value is not None and stated_value is not None and given_value != stated_value:
            raise ConfigError(
                f"{name} is not what {in_environment.cluster} says",
                got=f"{given_value}, not {stated_value}",
                fix="leave it out",
            )
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
            fix=f"HOST:PORT with a port up to {65_535 - PLANS_PORT}; or auto, under Slurm or Kubernetes",
        )
    return host, int(port)


# -- clusters ----------------------------------------------------------------------------------------------------------


def in_cluster(environment: Mapping[str, str], full_name: str) -> Found:
    """The place of this process by the variables of Slurm, of a LeaderWorkerSet or of a Kubernetes job or StatefulSet."""
    if "SLURM_PROCID" in environment:
        return _slurm(environment)
    if "LWS_LEADER_ADDRESS" in environment:
        return Found(
            "a LeaderWorkerSet",
            f"{environment['LWS_LEADER_ADDRESS']}:{_KUBERNETES_PORT}",
            _number(environment, "LWS_GROUP_SIZE"),
            _number(environment, "LWS_WORKER_INDEX"),
        )
    if "KUBERNETES_SERVICE_HOST" in environment:
        return _kubernetes(environment, full_name)
    return Found()


def _slurm(environment: Mapping[str, str]) -> Found:
    """A task of a job step; host 0 is the first node, with a port by the job's number."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = _number(environment, "SLURM_JOB_ID")
    first, count = _SLURM_PORTS
    port = first + 2 * (job or 0) % count
    coordinator = f"{first_node(nodes)}:{port}" if nodes and job is not None else None
    num_hosts = _number(environment, "SLURM_STEP_NUM_TASKS")
    if num_hosts is None:
        num_hosts = _number(environment, "SLURM_NTASKS")
    return Found("Slurm", coordinator, num_hosts, _number(environment, "SLURM_PROCID"))


def first_node(nodes: str) -> str:
    """The first name of Slurm's list, as `gpu[07-09,12],login1` → `gpu07`."""
    parts = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in parts.groups()) if parts else nodes


def _kubernetes(environment: Mapping[str, str], full_name: str) -> Found:
    """A pod of an indexed job or of a StatefulSet, whose names end with their numbers, behind a headless service.

    Kubernetes does not tell a pod how many there are.
    """
    pod, _, domain = full_name.partition(".")
    base, _, ordinal = pod.rpartition("-")
    host_id = _number(environment, "JOB_COMPLETION_INDEX")
    if host_id is None and ordinal.isdecimal():
        host_id = int(ordinal)
    coordinator = f"{base}-0.{domain}:{_KUBERNETES_PORT}" if base and domain and host_id is not None else None
    return Found("Kubernetes", coordinator, None, host_id)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
