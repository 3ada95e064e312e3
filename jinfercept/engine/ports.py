"""What an engine drives: something that executes plans, and something that answers calls."""

from collections.abc import Mapping
from typing import Protocol

from jinfercept.request import Call, Result, Tool
from jinfercept.sched.plan import Masks, StepPlan, StepResult


class Runner[Ticket](Protocol):
    """Executes plans, in order, without knowing requests."""

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Ticket:
        """Start the plan; does not wait for the device, unless `masks` does."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the plan's tokens."""
        ...

    def reset(self) -> None:
        """Forget all KV, after a step has failed."""
        ...


class Endpoints(Protocol):
    """Answers calls, off the engine's thread."""

    def call(self, request_id: str, calls: tuple[Call, ...], tools: Mapping[str, Tool]) -> None: ...

    def poll(self) -> list[tuple[str, tuple[Result, ...]]]: ...

    def next_s(self) -> float | None: ...

    def cancel(self, request_id: str) -> None: ...
