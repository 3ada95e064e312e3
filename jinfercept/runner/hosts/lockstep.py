"""Hosts in step: what host 0's runner executes, the loop of every other host executes too, in the same order."""

import logging
import signal
import threading
from collections import deque
from types import FrameType
from typing import Final, Protocol, final

from jinfercept.runner.hosts.group import HostGroup
from jinfercept.runner.hosts.link import Kind
from jinfercept.runner.hosts.wire import decode_masks, decode_plan, encode_masks, encode_plan
from jinfercept.sched.plan import Masks, PlanRunner, StepPlan, StepResult


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


log = logging.getLogger(__name__)

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
