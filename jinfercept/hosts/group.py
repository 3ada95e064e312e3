"""The hosts of a group while they serve: what one sends to the others, and how all end when one is lost.

Every process has a thread that sends heartbeats once a second and a thread for each link that listens. They run beside JAX, so
that a host is missed while the others wait for it in a collective. A closed connection is noticed at once, silence after
`SILENCE_S`. Then, and if a host fails, every process writes one line to standard error and ends with status 1: a thread that
waits in a collective cannot be brought back.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Final, final

from jinfercept.errors import JinferceptError, describe_failure
from jinfercept.hosts.link import Frame, HostLink, Kind
from jinfercept.hosts.wire import decode_values, encode_values

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 6.0
"""Seconds without a frame after which a host that serves is lost."""
START_SILENCE_S: Final = 60.0
"""The same while hosts load and compile, when one call may keep the interpreter's lock for long."""
REASON_S: Final = 1.0
"""Seconds that a failed host waits for the news that another was lost, which its collective may have failed of; and that
host 0 waits for the others to end."""


def end_process(message: str) -> None:
    """Write the message to standard error and end this process with status 1, whatever its threads do."""
    with suppress(OSError, ValueError):
        print(f"jinfercept: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@final
class HostGroup:
    """This process's links to the others: host 0's to all, of every other one to host 0.

    Args:
        links: by the number of the host at the other end.
        end: called with the reason when a host is lost or fails; it should not return.
    """

    def __init__(self, host_id: int, links: Mapping[int, HostLink], end: Callable[[str], None] = end_process) -> None:
        self.host_id = host_id
        self._links, self._end = dict(links), end
        self._silence_s = START_SILENCE_S
        self._heard_s = dict.fromkeys(links, time.monotonic())
        self._inboxes = {peer: SimpleQueue[Frame]() for peer in links}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        for peer in links:
            threading.Thread(target=self._listen, args=(peer,), name=f"jinfercept-host-{peer}", daemon=True).start()
        threading.Thread(target=self._watch, name="jinfercept-heartbeat", daemon=True).start()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame to every other end, without waiting for what they do with it."""
        for peer, link in self._links.items():
            try:
                link.send(kind, body)
            except OSError as error:
                self._lose(peer, str(error))

    def take(self, peer: int = 0) -> Frame:
        """Wait for the next frame of another host that is no heartbeat."""
        return self._inboxes[peer].get()

    def least(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The smallest of every host's numbers, by name. All hosts call it, in the same order; it waits for them."""
        if self.host_id:
            self.send(Kind.NUMBERS, encode_values(numbers))
            return self._numbers(0)
        proposed = [dict(numbers), *(self._numbers(peer) for peer in self._links)]
        agreed = {name: min(of_host[name] for of_host in proposed) for name in numbers}
        self.send(Kind.NUMBERS, encode_values(agreed))
        return agreed

    def begin(self) -> None:
        """Wait until all hosts can serve; from then on a silent one is lost soon."""
        self.least({})
        self._silence_s = SILENCE_S

    def fail(self, message: str) -> None:
        """End every process of the group, host 0 last: JAX's connection of the others depends on it."""
        if not self._end_once():
            return
        for link in self._links.values():
            with suppress(OSError):
                link.limit(1.0)
                link.send_if_free(Kind.FAILED, encode_values({"message": message}))
        if not self.host_id:
            time.sleep(REASON_S)
        self._end(message)

    def close(self) -> None:
        """End in order: host 0 ends the others, and no end of a connection is an error any more."""
        if not self._end_once():
            return
        for link in self._links.values():
            with suppress(OSError):
                if not self.host_id:
                    link.send(Kind.CLOSE)
                link.close()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the group if the body raises: the hosts may have executed different things. A lost host is the better reason."""
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
        kind, body = self.take(peer)
        assert kind == Kind.NUMBERS, kind
        return decode_values(body)

    def _listen(self, peer: int) -> None:
        """Pass on what one link receives, until it ends."""
        while True:
            try:
                frame = self._links[peer].receive()
            except OSError as error:
                self._lose(peer, str(error))
                return
            self._heard_s[peer] = time.monotonic()
            if frame.kind == Kind.FAILED:
                self.fail(str(decode_values(frame.body)["message"]))
            elif frame.kind == Kind.CLOSE:  # what follows is no failure
                self._closing.set()
            if frame.kind != Kind.HEARTBEAT:
                self._inboxes[peer].put(frame)

    def _watch(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            for peer, link in self._links.items():
                silent_s = time.monotonic() - self._heard_s[peer]
                if silent_s > self._silence_s:
                    self._lose(peer, f"silent for {silent_s:.0f} s")
                with suppress(OSError):  # the listener sees it too
                    link.send_if_free(Kind.HEARTBEAT)

    def _lose(self, peer: int, why: str) -> None:
        self.fail(f"host {peer} was lost ({why}); all hosts end, start them again")
