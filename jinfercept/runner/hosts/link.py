"""Which of how many processes this one is, the ZeroMQ socket between them, and the frames on it.

A frame is a kind, and bytes that the kind explains.

CURVE encrypts and signs all that is sent. Host 0's key pair is made of the token, and its public key is never sent. So a
process without the token can neither connect nor read.
"""

import hmac
import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

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


_HEARTBEAT_MS = 1_000
_SILENCE_MS = 6_000
"""A connection ends after this time without an answer to heartbeats, which ZeroMQ's own thread sends and answers."""
_RETRY_MS = 200
_LINGER_MS = 1_000
"""At the end: how long frames may take to leave."""
_WAIT_S = 0.2
_MOST_BYTES = 1 << 16
"""Of a frame to host 0."""
_OPEN = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CONTEXTS = set["zmq.Context[Any]"]()
"""Of the links that are not closed: the end of a context, also by the garbage collector, waits for its sockets."""
_EVENTS = _OPEN | _REFUSED | zmq.EVENT_DISCONNECTED


class Kind(IntEnum):
    HELLO = 0
    WELCOME = 1
    REFUSED = 2
    PROBE = 3
    NUMBERS = 4
    FORWARD = 5
    SAMPLE = 6
    RESET = 7
    CLOSE = 8
    FAILED = 9


_KINDS = {bytes([kind]) for kind in Kind if kind is not Kind.PROBE}


class Frame(NamedTuple):
    """A kind, the bytes that it explains, and for host 0 the connection it came on."""

    kind: Kind
    body: bytes
    peer: bytes = b""


@final
class HostLink:
    """Host 0's end of all connections, or another host's end of its own. Thread-safe; one thread may wait.

    Args:
        token: the secret; empty: none.

    Raises:
        ConfigError: host 0 cannot listen at its address.
    """

    def __init__(self, placement: Placement, token: str) -> None:
        secret_key = z85.encode(hmac.digest(token.encode(), b"jinfercept host 0", "sha256"))
        self._context = zmq.Context()
        _CONTEXTS.add(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER if placement.host_id else zmq.ROUTER)
        self._lock = threading.Lock()
        self._event = self._events = 0  # the last one of the connection to host 0, and all so far
        options: dict[int, Any] = {
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.LINGER: _LINGER_MS,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _SILENCE_MS,
        }
        if placement.host_id:
            public_key, own_key = zmq.curve_keypair()
            options |= {zmq.CURVE_SERVERKEY: zmq.curve_public(secret_key), zmq.CURVE_PUBLICKEY: public_key}
            options |= {zmq.CURVE_SECRETKEY: own_key, zmq.RECONNECT_IVL: _RETRY_MS}
        else:
            options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret_key, zmq.ROUTER_MANDATORY: 1}
            options[zmq.MAXMSGSIZE] = _MOST_BYTES
        try:
            self._open(placement, options)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(
                "host 0 cannot listen for the others",
                got=f"{placement.plans_address}: {error}",
                fix="give --coordinator an address of host 0 itself, and a port that is free with the one above it",
            ) from error

    def _open(self, placement: Placement, options: dict[int, Any]) -> None:
        options[zmq.IPV6] = 1
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._fds = [self._socket.fileno(), self._monitor.fileno()]
        if placement.host_id:
            self._socket.connect(f"tcp://{placement.plans_address}")  # ZeroMQ looks the name up until it is known
            return
        port = placement.port + PLANS_PORT
        address = socket.getaddrinfo(placement.address, port, type=socket.SOCK_STREAM)[0][4][0]
        self._socket.bind(f"tcp://{f'[{address}]' if ':' in str(address) else address}:{port}")

    @property
    def is_refused(self) -> bool:
        """Whether host 0 has ended a connection before it was open: it has another token, or is no host."""
        self._last_event()
        return bool(self._events & _REFUSED)

    def send(self, kind: Kind, body: bytes = b"", peer: bytes = b"") -> None:
        """Send a frame without waiting. Raises `ConnectionError` if there is no connection. `peer` is one of host 0's
        connections."""
        with self._lock:
            try:
                self._socket.send_multipart([*([peer] if peer else []), bytes([kind]), body], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ConnectionError("the connection was closed") from error

    def is_lost(self, peer: bytes) -> bool:
        try:
            if peer:
                self.send(Kind.PROBE, peer=peer)
                return False
        except ConnectionError:
            return True
        return self._last_event() != _OPEN

    def _last_event(self) -> int:
        with self._lock, suppress(zmq.ZMQError):  # it is closed
            while self._monitor.poll(0):
                self._event = recv_monitor_message(self._monitor)["event"]
                self._events |= self._event
        return self._event

    def receive(self) -> list[Frame]:
        """The frames that have come, without waiting."""
        frames: list[Frame] = []
        with self._lock, suppress(zmq.ZMQError):  # there are no more
            while True:
                *peer, kind, body = [b"", *self._socket.recv_multipart(zmq.NOBLOCK)]
                if kind[:1] in _KINDS:  # else it is a probe, or no host's
                    frames.append(Frame(Kind(kind[0]), body, b"".join(peer)))
        return frames

    def wait(self) -> None:
        """Wait until a frame comes or a connection ends, or for a moment: a `send` may take the signal of either."""
        with suppress(OSError):  # it is closed
            select.select(self._fds, [], [], _WAIT_S)

    def close(self) -> None:
        """End the connections, after what was sent has left."""
        with self._lock:
            self._context.destroy()
        _CONTEXTS.discard(self._context)
