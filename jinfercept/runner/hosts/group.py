"""How the hosts of a group find each other, stay in step, and all end when one is lost.

The other hosts connect to host 0 with the token's key, and say what they run. All start, or none: if a host is missing, comes
twice or runs something else, every host that has come gets the same `ConfigError`. What host 0's runner executes, the loop of
every other host then executes too, in the same order.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import FrameType
from typing import Final, Protocol, final

from jinfercept.errors import ConfigError, JinferceptError, describe_failure
from jinfercept.runner.hosts.link import TOKEN_VARIABLE, Frame, HostLink, Kind, Placement
from jinfercept.runner.hosts.wire import (
    decode_masks,
    decode_plan,
    decode_values,
    encode_masks,
    encode_plan,
    encode_values,
)
from jinfercept.sched.plan import Masks, PlanRunner, StepPlan, StepResult

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""Seconds for host 0's answer, beyond those for which it waits for others."""


def meet(
    placement: Placement, facts: Mapping[str, str], token: str, timeout_s: float
) -> tuple[HostLink, dict[int, bytes]]:
    """Connect this host. Returns its link, and its connections by the number of the host at the other end. Raises
    `ConfigError`.

    Args:
        facts: what has to be the same on every host, by name.
        token: the secret; empty: none.
    """
    facts = {"--num-hosts": str(placement.num_hosts), **facts}
    link, came = HostLink(placement, token), list[bytes]()
    try:
        if placement.host_id:
            _join(link, placement, facts, timeout_s)
            return link, {0: b""}
        return link, _gather(link, came, placement.num_hosts, facts, timeout_s)
    except ConfigError as error:
        for peer in came:
            refuse(link, peer, error)
        link.close()
        raise


def refuse(link: HostLink, peer: bytes, error: ConfigError) -> None:
    """Tell a host why it cannot come."""
    with suppress(ConnectionError):
        link.send(Kind.REFUSED, encode_values({"what": error.what, "got": str(error.got), "fix": error.fix}), peer)


def _gather(
    link: HostLink, came: list[bytes], num_hosts: int, facts: Mapping[str, str], timeout_s: float
) -> dict[int, bytes]:
    deadline_s, hosts = time.monotonic() + timeout_s, dict[int, bytes]()
    while missing := sorted({*range(1, num_hosts)} - {*hosts}):
        if time.monotonic() > deadline_s:
            name = "host" if len(missing) == 1 else "hosts"
            raise ConfigError(
                f"{name} {', '.join(map(str, missing))} of {num_hosts} did not come within {timeout_s:g} s",
                got=f"{num_hosts - len(missing)} hosts",
                fix="start all, with this --coordinator and --num-hosts; --host-timeout waits longer",
            )
        link.wait()
        hellos = [frame for frame in link.receive() if frame.kind == Kind.HELLO]
        hosts = {host_id: peer for host_id, peer in hosts.items() if not link.is_lost(peer)}  # it may come again
        for _, body, peer in hellos:
            try:
                values = decode_values(body)
                host_id, others = int(values["host_id"]), dict[str, str](values["facts"])
            except (ValueError, TypeError, KeyError):
                continue  # it is no host
            came.append(peer)
            if host_id in hosts:
                fix = "give each a --host-id of its own"
                raise ConfigError("two hosts have the same number", got=f"host {host_id} twice", fix=fix)
            if others != facts:
                differing = sorted(name for name in {**facts, **others} if facts.get(name) != others.get(name))
                got = "; ".join(
                    f"{name} {str(facts.get(name))[:80]} on host 0, {str(others.get(name))[:80]} on host {host_id}"
                    for name in differing
                )
                fix = "start all with the same versions, options and model"
                raise ConfigError("the hosts do not run the same", got=got, fix=fix)
            hosts[host_id] = peer
            log.info("host %d of %d has come", len(hosts), num_hosts - 1)
    for peer in hosts.values():
        with suppress(ConnectionError):  # a host that was lost meanwhile ends all
            link.send(Kind.WELCOME, peer=peer)
    return hosts


def _join(link: HostLink, placement: Placement, facts: Mapping[str, str], timeout_s: float) -> None:
    address, deadline_s = placement.plans_address, time.monotonic() + timeout_s
    link.send(Kind.HELLO, encode_values({"host_id": placement.host_id, "facts": dict(facts)}))
    was_open = False
    while not (frames := link.receive()):
        if link.is_refused:
            raise ConfigError(
                "this host has another token than host 0, or what listens there is no host",
                got=address,
                fix=f"set ${TOKEN_VARIABLE} alike on all, and see --coordinator",
            )
        is_open = not link.is_lost(b"")
        if was_open and not is_open:
            raise ConfigError("host 0 ended the start", got=address, fix="see what host 0 says")
        if time.monotonic() > deadline_s + _ANSWER_S * is_open:
            fix = "start it, and check --coordinator; --host-timeout waits longer"
            raise ConfigError(f"host 0 does not answer within {timeout_s:g} s", got=address, fix=fix)
        was_open = is_open
        link.wait()
    if frames[0].kind != Kind.WELCOME:
        refusal = decode_values(frames[0].body)
        raise ConfigError(f"host 0 refuses: {refusal['what']}", got=refusal["got"], fix=refusal["fix"])


REASON_S: Final = 1.0
"""Seconds that a failed host waits for the news that another was lost, which its collective may have failed of; and that
host 0 waits for the others to end."""
_LATE = ConfigError("the hosts have started without this one", got="a host that comes too late", fix="start all again")


def end_process(message: str) -> None:
    """Write the message to standard error and end this process with status 1, whatever its threads do."""
    with suppress(OSError, ValueError):
        print(f"jinfercept: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@final
class HostGroup:
    """The connections of this process: host 0 has one to every other host, each of which has one to host 0.

    Args:
        peers: the connections by the number of the host at the other end.
        end: called with the reason when a host is lost or fails; it should not return.
    """

    def __init__(
        self, host_id: int, link: HostLink, peers: Mapping[int, bytes], end: Callable[[str], None] = end_process
    ) -> None:
        self.host_id = host_id
        self._link, self._peers, self._end = link, peers, end
        self._hosts = {peer: other_id for other_id, peer in peers.items()}
        self._inboxes = {other_id: SimpleQueue[Frame]() for other_id in peers}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # A thread of its own, beside JAX, so that a host is missed while the others wait for it in a collective. The end of a
        # connection is noticed at once, silence after six seconds (`link`).
        threading.Thread(target=self._receive, name="jinfercept-hosts", daemon=True).start()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame to every other end, without waiting for an answer."""
        for other_id, peer in self._peers.items():
            try:
                self._link.send(kind, body, peer)
            except ConnectionError as error:
                self._lose(other_id, error)

    def take(self, peer: int = 0) -> Frame:
        """Wait for the next frame of another host that is no heartbeat."""
        return self._inboxes[peer].get()

    def least(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The smallest of all hosts' numbers, by name. All hosts call it, in the same order; it waits for them."""
        if self.host_id:
            self.send(Kind.NUMBERS, encode_values(numbers))
            return self._numbers(0)
        proposed = [dict(numbers), *map(self._numbers, self._peers)]
        agreed = {name: min(of_host[name] for of_host in proposed) for name in numbers}
        self.send(Kind.NUMBERS, encode_values(agreed))
        return agreed

    def fail(self, message: str) -> None:
        """End every process of the group, host 0 last: JAX's connection of the others depends on it."""
        if not self._end_once():
            return
        for peer in self._peers.values():
            with suppress(ConnectionError):
                self._link.send(Kind.FAILED, encode_values({"message": message}), peer)
        if not self.host_id:
            time.sleep(REASON_S)
        self._link.close()
        self._end(message)  # the process: a thread that waits in a collective cannot be brought back

    def close(self) -> None:
        """End in order. Host 0 ends the others; the end of a connection is no error any more."""
        if self._end_once() and not self.host_id:
            for peer in self._peers.values():
                with suppress(ConnectionError):
                    self._link.send(Kind.CLOSE, peer=peer)
        self._link.close()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the group if the body raises, since the hosts may have executed different things. A lost host is the better
        reason."""
        try:
            yield
        except BaseException as error:
            time.sleep(REASON_S)
            if not isinstance(error, JinferceptError | SystemExit):
                log.error("host %d failed", self.host_id, exc_info=error)
            self.fail(f"host {self.host_id} failed: {describe_failure(error)}")
            raise

    def _end_once(self) -> bool:
        with self._lock:
            ended = self._closing.is_set()
            self._closing.set()
        return not ended

    def _numbers(self, peer: int) -> dict[str, int]:
        kind, body, _ = self.take(peer)
        assert kind == Kind.NUMBERS, kind
        return decode_values(body)

    def _receive(self) -> None:
        while not self._closing.is_set():
            self._link.wait()
            lost = [other_id for other_id, peer in self._peers.items() if self._link.is_lost(peer)]
            for frame in self._link.receive():  # what the lost ones sent before, too
                self._take(frame)
            for other_id in lost:
                self._lose(other_id, "the connection was closed")

    def _take(self, frame: Frame) -> None:
        if frame.peer not in self._hosts:
            if frame.kind == Kind.HELLO:
                refuse(self._link, frame.peer, _LATE)
            return
        if frame.kind == Kind.FAILED:
            self.fail(str(decode_values(frame.body)["message"]))
        elif frame.kind == Kind.CLOSE:  # what follows is no failure
            self._closing.set()
        self._inboxes[self._hosts[frame.peer]].put(frame)

    def _lose(self, host_id: int, why: object) -> None:
        self.fail(f"host {host_id} was lost ({why}); all hosts end, start them again")


class HostRunner[Forward, Ticket](PlanRunner[Forward, Ticket], Protocol):
    def close(self) -> None: ...


@final
class LeadingRunner[Forward, Ticket]:
    """The runner of host 0, which sends what it is given to all other hosts before it executes it, and waits for none of
    them."""

    def __init__(self, runner: HostRunner[Forward, Ticket], group: HostGroup) -> None:
        self._runner, self._group = runner, group

    def forward(self, plan: StepPlan) -> Forward:
        self._group.send(Kind.FORWARD, encode_plan(plan))
        with self._group.failing():
            return self._runner.forward(plan)

    def sample(self, forward: Forward, masks: Masks) -> Ticket:
        self._group.send(Kind.SAMPLE, encode_masks(masks))
        with self._group.failing():
            return self._runner.sample(forward, masks)

    def submit(self, plan: StepPlan) -> Ticket:
        return self.sample(self.forward(plan), {})

    def collect(self, ticket: Ticket) -> StepResult:
        with self._group.failing():
            return self._runner.collect(ticket)

    def reset(self) -> None:
        self._group.send(Kind.RESET)
        with self._group.failing():
            self._runner.reset()

    def close(self) -> None:
        """End the other hosts in order, and free the weights and the pages."""
        self._group.close()
        self._runner.close()


MOST_IN_FLIGHT: Final = 2
"""Plans whose tokens are not there: host 0 has as many, and so this host keeps no more memory than that one."""


def follow[Forward, Ticket](runner: HostRunner[Forward, Ticket], group: HostGroup) -> None:
    """Execute host 0's plans with this host's runner, and free it when host 0 ends. If it raises, the whole group ends."""
    with group.failing():
        _execute(runner, group)
    group.close()
    runner.close()


def _execute[Forward, Ticket](runner: HostRunner[Forward, Ticket], group: HostGroup) -> None:
    forward: Forward | None = None
    in_flight = deque[Ticket]()
    while True:
        kind, body, _ = group.take()
        match kind:
            case Kind.FORWARD:
                forward = runner.forward(decode_plan(body))
            case Kind.SAMPLE:
                assert forward is not None, "a plan is sampled that was not begun"
                in_flight.append(runner.sample(forward, decode_masks(body)))
                if len(in_flight) > MOST_IN_FLIGHT:
                    runner.collect(in_flight.popleft())
            case Kind.RESET:
                in_flight.clear()
                runner.reset()
            case Kind.CLOSE:
                return
            case _:
                raise AssertionError(f"host 0 sends no {kind.name} while it serves")


def end_after_host_0(group: HostGroup) -> None:
    """Let the first SIGTERM or SIGINT of this process wait for host 0, which drains; the second ends the group."""
    if threading.current_thread() is not threading.main_thread():
        return
    received = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            group.fail(f"host {group.host_id} was ended by {signal.Signals(number).name}")
        log.warning("%s: this host ends with host 0; again: at once", signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
