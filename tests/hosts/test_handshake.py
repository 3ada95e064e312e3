"""Hosts come together, or all of them learn why not."""

import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from jinfercept.errors import ConfigError
from jinfercept.hosts.handshake import Reception, _proof, join
from jinfercept.hosts.link import HostLink, Kind
from jinfercept.hosts.placement import Placement
from jinfercept.hosts.wire import decode_values, encode_values
from tests.support.hosts import free_port

FACTS = {"jax": "0.11.2", "--dtype": "float32"}


class Start:
    """The hosts of a group, each on a thread."""

    def __init__(self, num_hosts: int, timeout_s: float = 60.0) -> None:
        self.port, self.num_hosts, self.timeout_s = free_port(), num_hosts, timeout_s
        self.pool = ThreadPoolExecutor(8)

    def host_0(self, token: str = "") -> Future[dict[int, HostLink]]:
        return self.pool.submit(Reception(self.place(0), FACTS, token).gather, self.timeout_s)

    def other(
        self, host_id: int, num_hosts: int | None = None, facts: Mapping[str, str] = FACTS, token: str = ""
    ) -> Future[HostLink]:
        return self.pool.submit(join, self.place(host_id, num_hosts), facts, token, self.timeout_s)

    def place(self, host_id: int, num_hosts: int | None = None) -> Placement:
        return Placement("127.0.0.1", self.port, num_hosts or self.num_hosts, host_id)


def test_hosts_meet_in_any_order_and_later_ones_are_refused() -> None:
    start = Start(3)
    early = start.other(2)
    links = start.host_0()
    middle = start.other(1)
    met = links.result()
    assert sorted(met) == [1, 2]
    met[2].send(Kind.SAMPLE, b"hello")
    assert early.result().receive() == (Kind.SAMPLE, b"hello")
    middle.result()
    with pytest.raises(ConfigError, match="host 0 refuses: the hosts have started without this one"):
        start.other(1).result()


@pytest.mark.parametrize(
    ("num_hosts", "facts", "words"),
    [
        (3, FACTS, "the hosts do not agree on their number; got 2 on host 0, 3 on host 1"),
        (2, {**FACTS, "jax": "0.12.0"}, "the hosts do not run the same; got jax 0.11.2 on host 0, 0.12.0 on host 1"),
        (2, {"jax": "0.11.2"}, "got --dtype float32 on host 0, None on host 1"),
    ],
)
def test_a_host_that_differs_stops_the_start_on_all(num_hosts: int, facts: Mapping[str, str], words: str) -> None:
    start = Start(2)
    links, other = start.host_0(), start.other(1, num_hosts, facts)
    for host in (links, other):
        with pytest.raises(ConfigError) as error:
            host.result()
        assert words in str(error.value)


def test_two_hosts_with_one_number_stop_the_start_on_all() -> None:
    start = Start(3)
    hosts = [start.host_0(), start.other(1), start.other(1)]
    for host in hosts:
        with pytest.raises(ConfigError, match="two hosts have the same number; got host 1 twice"):
            host.result()


def test_a_host_that_does_not_come_stops_the_start_on_all() -> None:
    start = Start(4, timeout_s=1)
    links, other = start.host_0(), start.other(2)
    for host in (links, other):
        with pytest.raises(ConfigError, match=r"hosts 1, 3 of 4 did not come within 1 s; got 2 hosts"):
            host.result()
    with pytest.raises(ConfigError, match=r"host 0 does not answer within 0\.1 s; got 127"):
        Start(4, timeout_s=0.1).other(1).result()


def test_only_hosts_that_know_the_token_come() -> None:
    start = Start(2)
    links = start.host_0("secret")
    for token in ("", "another"):
        with pytest.raises(ConfigError, match="this host has another token than host 0"):
            start.other(1, token=token).result()
    right = start.other(1, token="secret")
    assert sorted(links.result()) == [1]
    right.result()


def test_a_false_host_0_is_found_out() -> None:
    start = Start(2)
    with socket.create_server(("127.0.0.1", start.port + 1)) as listener:
        other = start.other(1, token="secret")
        with closing(HostLink(listener.accept()[0])) as false:
            false.send(Kind.CHALLENGE, bytes(32))
            false.receive()
            false.send(Kind.WELCOME, bytes(32))
            with pytest.raises(ConfigError, match="this host has another token than host 0"):
                other.result()


def test_strangers_do_not_disturb_a_start() -> None:
    start = Start(2)
    links = start.host_0()
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00\x01abcd", b""):
        with socket.create_connection(("127.0.0.1", start.port + 1)) as stranger:
            stranger.sendall(data)
    right = start.other(1)
    assert sorted(links.result()) == [1]
    right.result()


def test_host_0_listens_at_an_address_of_its_own_only() -> None:
    with pytest.raises(ConfigError, match="host 0 cannot listen for the others; got 192"):
        Reception(Placement("192.0.2.1", free_port(), 2, 0), FACTS, "")


def test_a_host_that_was_started_again_takes_its_own_place() -> None:
    start = Start(3)
    links = start.host_0()
    with closing(socket.create_connection(("127.0.0.1", start.port + 1))) as stranger:  # says nothing
        first = join_and_leave(start, 1)
        second, third = start.other(1), start.other(2)
        assert sorted(links.result()) == [1, 2]
        second.result()
        third.result()
        assert first
        stranger.close()


def test_a_host_that_left_is_waited_for_though_all_others_have_come() -> None:
    start = Start(3)
    links = start.host_0()
    join_and_leave(start, 1)
    third = start.other(2)
    with pytest.raises(TimeoutError):
        links.result(timeout=0.3)  # host 2 arrives in this time
    second = start.other(1)
    assert sorted(links.result()) == [1, 2]
    second.result()
    third.result()


def join_and_leave(start: Start, host_id: int) -> bool:
    """A host that greets host 0 as it should and is gone then."""
    link = HostLink(socket.create_connection(("127.0.0.1", start.port + 1)))
    challenge = link.receive().body
    greeting = encode_values({"host_id": host_id, "num_hosts": start.num_hosts, "facts": FACTS})
    nonce = bytes(32)
    link.send(Kind.HELLO, _proof("", b"hello", nonce + challenge + greeting) + nonce + greeting)
    link.close()
    return True


@pytest.mark.parametrize("message", [b"\x81\x80\xc0", b"\x80" * 60_000, b"\x81\x92\x01\x02\x00"])
def test_what_does_not_know_the_token_is_not_read(message: bytes) -> None:
    start = Start(2)
    links = start.host_0(token="secret")
    with closing(HostLink(socket.create_connection(("127.0.0.1", start.port + 1)))) as stranger:
        stranger.receive()
        stranger.send(Kind.HELLO, bytes(64) + message)
        assert stranger.receive().kind == Kind.REFUSED
        start.other(1, token="secret").result()
        assert sorted(links.result()) == [1]


def test_of_many_silent_connections_the_later_ones_are_closed_and_a_host_still_comes() -> None:
    start = Start(2)
    links = start.host_0()
    silent = [socket.create_connection(("127.0.0.1", start.port + 1), timeout=60) for _ in range(80)]
    for connection in silent:
        connection.settimeout(60)
        with suppress(OSError):
            connection.recv(1)  # the challenge, or the end: host 0 has accepted it
    for connection in silent[:40]:
        connection.close()
    start.other(1).result()
    assert sorted(links.result()) == [1]
    for connection in silent[40:]:
        connection.close()


def test_keys_whose_hashes_a_sender_can_choose_are_refused() -> None:
    with pytest.raises(ValueError, match="not allowed"):
        decode_values(b"\x81\x92\x01\x02\x00")
