"""Host 0's runner: what it executes, all other hosts execute too, in the same order."""

from typing import Protocol, final

from jinfercept.hosts.group import HostGroup
from jinfercept.hosts.link import Kind
from jinfercept.hosts.wire import encode_masks, encode_plan
from jinfercept.sched.plan import Masks, StepPlan, StepResult


class HostRunner[Forward, Ticket](Protocol):
    """One host's runner. Only `collect` waits for the devices."""

    def forward(self, plan: StepPlan) -> Forward: ...

    def drafts(self, forward: Forward) -> tuple[tuple[int, ...], ...]: ...

    def sample(self, forward: Forward, masks: Masks) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


@final
class LeadingRunner[Forward, Ticket]:
    """The runner of host 0, which sends what it is given to all other hosts before it executes it.

    Nothing waits for what the others do. If the runner raises, the group ends: the hosts may be out of step.
    """

    def __init__(self, runner: HostRunner[Forward, Ticket], group: HostGroup) -> None:
        self._runner, self._group = runner, group

    def forward(self, plan: StepPlan) -> Forward:
        """Dispatch a plan's transfers and its forward pass, on all hosts."""
        self._group.send(Kind.FORWARD, encode_plan(plan))
        with self._group.failing():
            return self._runner.forward(plan)

    def drafts(self, forward: Forward) -> tuple[tuple[int, ...], ...]:
        """The drafts that a draft model made for a plan, on this host."""
        return self._runner.drafts(forward)

    def sample(self, forward: Forward, masks: Masks) -> Ticket:
        """Dispatch the sampling of the plan whose forward pass was dispatched last, on all hosts."""
        self._group.send(Kind.SAMPLE, encode_masks(masks))
        with self._group.failing():
            return self._runner.sample(forward, masks)

    def submit(self, plan: StepPlan) -> Ticket:
        """Dispatch both phases of a plan that has no constrained rows."""
        return self.sample(self.forward(plan), {})

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a plan's tokens, on this host."""
        with self._group.failing():
            return self._runner.collect(ticket)

    def reset(self) -> None:
        """Forget all KV, on all hosts."""
        self._group.send(Kind.RESET)
        with self._group.failing():
            self._runner.reset()

    def close(self) -> None:
        """Free the weights and the pages, and end the other hosts in order."""
        self._group.close()
        self._runner.close()
