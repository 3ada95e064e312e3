"""Hosts come together, or all of them learn why not."""

import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
import zmq

from jinfercept.errors import ConfigError
from jinfercept.runner.hosts.group import HostGroup, meet
from jinfercept.runner.hosts.link import HostLink, Kind, Placement
from jinfercept.runner.hosts.wire import decode_values, encode_values
from tests.support.hosts import free_port

FACTS = {"jax": "0.11.2", "--dtype": "float32"}
Met = Future[tuple[HostLink, dict[int, bytes]]]


class Start:
    """The hosts of a group, each on a thread."""

    def __init__(self, num_hosts: int, timeout_s: float = 60.0) -> None:
        self.port, self.num_hosts, self.timeout_s = free_port(), num_hosts, timeout_s
        self.pool = ThreadPoolExecutor(8)

    def host(
        self, host_id: int, num_hosts: int | None = None, facts: Mapping[str, str] = FACTS, token: str = ""
    ) -> Met:
        return self.pool.submit(meet, self.place(host_id, num_hosts), facts, token, self.timeout_s)

    def place(self, host_id: int, num_hosts: int | None = None) -> Placement:
        return Placement("127.0.0.1", self.port, num_hosts or self.num_hosts, host_id)


def test_hosts_meet_in_any_order_and_later_ones_are_refused() -> None:
    start = Start(3)
    early, first, middle = start.host(2), start.host(0), start.host(1)
    link, peers = first.result()
    assert sorted(peers) == [1, 2]
    assert [other.result()[1] for other in (early, middle)] == [{0: b""}] * 2
    HostGroup(0, link, peers, lambda message: None)
    with pytest.raises(ConfigError, match="host 0 refuses: the hosts have started without this one"):
        start.host(1).result()


@pytest.mark.parametrize(
    ("num_hosts", "facts", "words"),
    [
        (3, FACTS, "the hosts do not run the same; got --num-hosts 2 on host 0, 3 on host 1"),
        (2, {**FACTS, "jax": "0.12.0"}, "the hosts do not run the same; got jax 0.11.2 on host 0, 0.12.0 on host 1"),
        (2, {"jax": "0.11.2"}, "got --dtype float32 on host 0, None on host 1"),
    ],
)
def test_a_host_that_differs_stops_the_start_on_all(num_hosts: int, facts: Mapping[str, str], words: str) -> None:
    start = Start(2)
    links, other = start.host(0), start.host(1, num_hosts, facts)
    for host in (links, other):
        with pytest.raises(ConfigError) as error:
            host.result()
        assert words in str(error.value)


def test_two_hosts_with_one_number_stop_the_start_on_all() -> None:
    start = Start(3)
    hosts = [start.host(0), start.host(1), start.host(1)]
    for host in hosts:
        with pytest.raises(ConfigError, match="two hosts have the same number; got host 1 twice"):
            host.result()


def test_a_host_that_does_not_come_stops_the_start_on_all() -> None:
    start = Start(4, timeout_s=1)
    links, other = start.host(0), start.host(2)
    for host in (links, other):
        with pytest.raises(ConfigError, match=r"hosts 1, 3 of 4 did not come within 1 s; got 2 hosts"):
            host.result()
    with pytest.raises(ConfigError, match=r"host 0 does not answer within 0\.1 s; got 127"):
        Start(4, timeout_s=0.1).host(1).result()


def test_only_hosts_that_know_the_token_come() -> None:
    start = Start(2)
    first = start.host(0, token="secret")
    for token in ("", "another"):
        with pytest.raises(ConfigError, match="this host has another token than host 0"):
            start.host(1, token=token).result()
    start.host(1, token="secret").result()
    assert sorted(first.result()[1]) == [1]


def test_a_false_host_0_is_found_out() -> None:
    start = Start(2)
    false = HostLink(start.place(0), "another")
    with pytest.raises(ConfigError, match="this host has another token than host 0"):
        start.host(1, token="secret").result()
    false.close()


def test_strangers_do_not_disturb_a_start() -> None:
    start = Start(2)
    first = start.host(0, token="secret")
    with pytest.raises(ConfigError):
        start.host(1, token="another").result()  # host 0 listens
    silent = [socket.create_connection(("127.0.0.1", start.port + 1), timeout=60) for _ in range(80)]
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00\x01abcd", b"", b"\xff" + bytes(200)):
        with socket.create_connection(("127.0.0.1", start.port + 1)) as stranger:
            stranger.sendall(data)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:  # without CURVE
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{start.port + 1}")
        stranger.send_multipart([bytes([0]), encode_values({"host_id": 1, "facts": FACTS})])
        start.host(1, token="secret").result()
        assert sorted(first.result()[1]) == [1]
    for connection in silent:
        connection.close()


def test_frames_that_no_host_sends_are_passed_over() -> None:
    start = Start(2)
    first = start.host(0)
    with closing(HostLink(start.place(1), "")) as stranger:  # without a token any process may connect
        for body in (b"", b"\xc1", encode_values({"host_id": "one"}), encode_values({"host_id": 1})):
            stranger.send(Kind.HELLO, body)
        stranger._socket.send_multipart([b"\xff", b""])  # pyright: ignore[reportPrivateUsage]
        start.host(1).result()
        assert sorted(first.result()[1]) == [1]


def test_host_0_listens_at_an_address_of_its_own_only() -> None:
    with pytest.raises(ConfigError, match="host 0 cannot listen for the others; got 192"):
        meet(Placement("192.0.2.1", free_port(), 2, 0), FACTS, "", 60.0)


def test_a_host_that_left_is_waited_for_though_all_others_have_come_and_may_come_again() -> None:
    start = Start(3)
    first = start.host(0)
    with closing(HostLink(start.place(1), "")) as leaving:
        leaving.send(Kind.HELLO, encode_values({"host_id": 1, "facts": {"--num-hosts": "3", **FACTS}}))
        with pytest.raises(TimeoutError):
            first.result(timeout=0.3)
    third = start.host(2)
    with pytest.raises(TimeoutError):
        first.result(timeout=0.3)  # host 2 arrives in this time
    second = start.host(1)
    assert sorted(first.result()[1]) == [1, 2]
    second.result()
    third.result()


def test_keys_whose_hashes_a_sender_can_choose_are_refused() -> None:
    with pytest.raises(ValueError, match="not allowed"):
        decode_values(b"\x81\x92\x01\x02\x00")
