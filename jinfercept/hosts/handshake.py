"""How the hosts of a group find each other: the others join host 0, prove that they know the token, and say what they run.

All start, or none: if one is missing, comes twice or runs something else, every host gets the same `ConfigError`. Host 0
answers later ones with a refusal for as long as it runs.
"""

import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple, final

from jinfercept.errors import ConfigError
from jinfercept.hosts.link import Frame, HostLink, Kind
from jinfercept.hosts.placement import PLANS_PORT, TOKEN_VARIABLE, Placement
from jinfercept.hosts.wire import decode_values, encode_values

log = logging.getLogger(__name__)

_NONCE_BYTES = 32
_MOST_BYTES = 1 << 16
"""Of a frame before the other end has proved anything."""
_MOST_GREETINGS = 64
"""Connections at a time that have not said who they are; further ones are closed."""
_ANSWER_S = 10.0
"""Seconds for a frame of the handshake, where the other end has nothing to wait for."""
_RETRY_S = 0.2


class ArrivedHost(NamedTuple):
    """A process that has proved that it knows the token, and said who it is.

    Attributes:
        nonces: its own and host 0's.
        values: what it said: `host_id`, `num_hosts`, `facts`.
    """

    link: HostLink
    nonces: bytes
    values: Mapping[str, object]


@final
class Reception:
    """Host 0's end of every handshake, until it is closed.

    Args:
        facts: what has to be the same on every host, by name.
        token: the secret; empty: none.

    Raises:
        ConfigError: host 0 cannot listen at its address.
    """

    def __init__(self, placement: Placement, facts: Mapping[str, str], token: str) -> None:
        self._placement, self._facts, self._token = placement, facts, token
        self._arrivals = SimpleQueue[ArrivedHost]()
        self._refusal: ConfigError | None = None
        self._answering = threading.Lock()  # so that no arrival is left in the queue when none is taken any more
        self._greetings = threading.BoundedSemaphore(_MOST_GREETINGS)
        self._closed = False
        self._listener = _listen(placement)
        threading.Thread(target=self._accept, name="jinfercept-reception", daemon=True).start()

    def gather(self, timeout_s: float) -> dict[int, HostLink]:
        """The links to all other hosts, by their numbers. Raises `ConfigError`, on every host that has come."""
        links: dict[int, HostLink] = {}
        try:
            welcomes = self._wait(links, time.monotonic() + timeout_s, timeout_s)
            _welcome(links, welcomes)
        except ConfigError as error:
            self.close()
            for link in links.values():
                _refuse(link, error)
            self._refuse_later_hosts(error)
            raise
        self._refuse_later_hosts(
            ConfigError(
                "the hosts have started without this one", got="a host that comes too late", fix="start all again"
            )
        )
        return links

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _refuse_later_hosts(self, error: ConfigError) -> None:
        """Refuse hosts that arrived meanwhile, and all that come from now on."""
        with self._answering:
            self._refusal = error
        while not self._arrivals.empty():
            _refuse(self._arrivals.get().link, error)

    def _wait(self, links: dict[int, HostLink], deadline: float, timeout_s: float) -> dict[int, bytes]:
        """Fill in the links as hosts arrive; returns the frames that welcome them."""
        welcomes: dict[int, bytes] = {}
        num_hosts = self._placement.num_hosts
        other_ids = range(1, num_hosts)
        while missing := [host_id for host_id in other_ids if host_id not in links or links[host_id].is_closed]:
            try:
                arrival = self._arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                name = "host" if len(missing) == 1 else "hosts"
                raise ConfigError(
                    f"{name} {', '.join(map(str, missing))} of {num_hosts} did not come within {timeout_s:g} s",
                    got=f"{num_hosts - len(missing)} hosts",
                    fix="start all, with this --coordinator and --num-hosts; --host-timeout waits longer",
                ) from None
            if arrival.link.is_closed:  # it ended since, and may come again
                arrival.link.close()
                continue
            try:
                host_id = self._checked(arrival.values, links)
            except ConfigError as error:
                _refuse(arrival.link, error)
                raise
            links[host_id] = arrival.link
            welcomes[host_id] = _proof(self._token, b"welcome", arrival.nonces)
            log.info("host %d has come from %s", host_id, arrival.link.peer)
        return welcomes

    def _checked(self, values: Mapping[str, object], links: dict[int, HostLink]) -> int:
        """The number of a host that may come. Raises `ConfigError`."""
        host_id, stated_hosts, facts = values.get("host_id"), values.get("num_hosts"), values.get("facts")
        num_hosts = self._placement.num_hosts
        if stated_hosts != num_hosts:
            raise ConfigError(
                "the hosts do not agree on their number",
                got=f"{num_hosts} on host 0, {stated_hosts} on host {host_id}",
                fix="start all with the same --num-hosts",
            )
        if not isinstance(host_id, int) or not 0 < host_id < num_hosts:
            raise ConfigError(
                "--host-id is outside the group",
                got=f"host {host_id} of {num_hosts}",
                fix="give --host-id from 0 on",
            )
        if host_id in links and links[host_id].is_closed:  # it was started again
            links.pop(host_id).close()
        if host_id in links:
            raise ConfigError(
                "two hosts have the same number", got=f"host {host_id} twice", fix="give each a --host-id of its own"
            )
        if facts != self._facts:
            own, other = self._facts, facts if isinstance(facts, dict) else {}
            got = "; ".join(
                f"{name} {str(own.get(name))[:80]} on host 0, {str(other.get(name))[:80]} on host {host_id}"
                for name in sorted(own.keys() | other.keys(), key=str)
                if own.get(name) != other.get(name)
            )
            fix = "start all with the same versions, options and model"
            raise ConfigError("the hosts do not run the same", got=got, fix=fix)
        return host_id

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # this process has no descriptor left
                continue
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        """Let one connection say who it is."""
        try:
            arrival = self._greet(HostLink(connection))
        except (OSError, ValueError, TypeError) as error:
            log.warning("what connects to the hosts' port is no host: %s", error)
            connection.close()
            return
        finally:
            self._greetings.release()
        with self._answering:
            refusal = self._refusal
            if refusal is None:
                self._arrivals.put(arrival)
        if refusal is not None:
            _refuse(arrival.link, refusal)

    def _greet(self, link: HostLink) -> ArrivedHost:
        """Ask for the token, and only then read what the other end says. Raises `OSError`, `ValueError` or `TypeError`."""
        link.limit(_ANSWER_S)
        nonce = os.urandom(_NONCE_BYTES)
        link.send(Kind.CHALLENGE, nonce)
        kind, body = link.receive(_MOST_BYTES, time.monotonic() + _ANSWER_S)
        if kind != Kind.HELLO:
            raise ConnectionError(f"no greeting: {kind.name}")
        link.limit(_ANSWER_S)
        proof, message = body[:_NONCE_BYTES], body[2 * _NONCE_BYTES :]
        nonces = body[_NONCE_BYTES : 2 * _NONCE_BYTES] + nonce
        if not hmac.compare_digest(proof, _proof(self._token, b"hello", nonces + message)):
            peer = link.peer
            _refuse(link, _wrong_token())
            raise ConnectionError(f"{peer} does not know their token")
        return ArrivedHost(link, nonces, decode_values(message))


def join(placement: Placement, facts: Mapping[str, str], token: str, timeout_s: float) -> HostLink:
    """The link of another host to host 0. Raises `ConfigError` if there is none in time, or it refuses."""
    deadline = time.monotonic() + timeout_s
    link = HostLink(_connect(placement, deadline, timeout_s))
    try:
        while (first_frame := _challenge(link)) is None and time.monotonic() + _RETRY_S < deadline:
            link.close()  # host 0 has as many connections as it takes, some of them strangers
            time.sleep(_RETRY_S)
            link = HostLink(_connect(placement, deadline, timeout_s))
        if first_frame is None:
            raise ConnectionError("the connection was closed")
        kind, challenge = first_frame
        if kind != Kind.CHALLENGE or len(challenge) != _NONCE_BYTES:
            raise ConnectionError("it does not ask who this is")
        nonces = os.urandom(_NONCE_BYTES) + challenge
        values = {"host_id": placement.host_id, "num_hosts": placement.num_hosts, "facts": dict(facts)}
        message = encode_values(values)
        link.send(Kind.HELLO, _proof(token, b"hello", nonces + message) + nonces[:_NONCE_BYTES] + message)
        kind, answer = link.receive(_MOST_BYTES, time.monotonic() + timeout_s + _ANSWER_S)  # host 0 waits for others
        refusal = _refusal_of(answer) if kind == Kind.REFUSED else None
    except (OSError, ValueError, TypeError) as error:
        link.close()
        raise ConfigError(
            "host 0 ended the start, or something else listens at its address",
            got=f"{placement.address}:{placement.port + PLANS_PORT}: {error}",
            fix="see what host 0 says, and --coordinator",
        ) from error
    if refusal is not None:
        link.close()
        raise refusal
    if not hmac.compare_digest(answer, _proof(token, b"welcome", nonces)):
        link.close()
        raise _wrong_token()
    link.limit(None)
    return link


def _challenge(link: HostLink) -> Frame | None:
    """The first frame from host 0; None if it closes the connection instead."""
    try:
        return link.receive(_MOST_BYTES, time.monotonic() + _ANSWER_S)
    except ConnectionError:
        return None


def _connect(placement: Placement, deadline: float, timeout_s: float) -> socket.socket:
    """A connection to host 0, which may start later than this host."""
    address = (placement.address, placement.port + PLANS_PORT)
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(_ANSWER_S, deadline - time.monotonic())))
        except OSError as error:  # a name that is not known yet among them
            if time.monotonic() + _RETRY_S > deadline:
                raise ConfigError(
                    f"host 0 does not answer within {timeout_s:g} s",
                    got=f"{address[0]}:{address[1]}: {error}",
                    fix="start it, and check --coordinator; --host-timeout waits longer",
                ) from error
        time.sleep(_RETRY_S)


def _listen(placement: Placement) -> socket.socket:
    """A socket at host 0's address, and at no other of the machine's."""
    port = placement.port + PLANS_PORT
    try:
        family, _, _, _, address = socket.getaddrinfo(placement.address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=_MOST_GREETINGS)
    except OSError as error:
        raise ConfigError(
            "host 0 cannot listen for the others",
            got=f"{placement.address}:{port}: {error}",
            fix="give --coordinator an address of host 0 itself, and a port that is free with the one above it",
        ) from error


def _welcome(links: Mapping[int, HostLink], welcomes: Mapping[int, bytes]) -> None:
    """Tell all hosts that all have come. Raises `ConfigError` if one has gone."""
    for host_id, link in links.items():
        try:
            link.send(Kind.WELCOME, welcomes[host_id])
        except OSError as error:
            raise ConfigError(
                f"host {host_id} was lost while the others came", got=str(error), fix="start all again"
            ) from error
        link.limit(None)


def _refusal_of(answer: bytes) -> ConfigError:
    """The error that host 0 sends, without what a terminal would obey. Raises `ValueError` for anything else."""
    parts = decode_values(answer)
    problem, got, fix = (
        "".join(c if c.isprintable() else "?" for c in str(parts.get(name, ""))) for name in ("what", "got", "fix")
    )
    return ConfigError(f"host 0 refuses: {problem}", got=got, fix=fix)


def _refuse(link: HostLink, error: ConfigError) -> None:
    with suppress(OSError):
        link.send(Kind.REFUSED, encode_values({"what": error.what, "got": str(error.got), "fix": error.fix}))
    link.close()


def _proof(token: str, role: bytes, message: bytes) -> bytes:
    """A proof about these bytes that only a process with the token can make."""
    return hmac.digest(token.encode(), role + message, "sha256")


def _wrong_token() -> ConfigError:
    return ConfigError(
        "this host has another token than host 0", got="another one, or none", fix=f"set ${TOKEN_VARIABLE} alike on all"
    )
