"""A virtual clock, and a runner that prices plans instead of executing them: the engine's in a simulation.

No JAX and no model: a simulated model writes a request's `forced_output_ids`, and zeros behind them.
"""

from threading import Event
from typing import NamedTuple, final

from jinfercept.engine.meter.ledger import Prices
from jinfercept.sched.plan import Masks, StepPlan, StepResult


@final
class VirtualClock:
    """A clock whose time passes only by `wait`, or when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, wake: Event, timeout_s: float) -> None:
        self.time += timeout_s
        wake.clear()


class PricedStep(NamedTuple):
    """A plan that is not executed, and the seconds at which it would begin and end."""

    tokens: tuple[int, ...]
    submitted_s: float
    done_s: float


@final
class PricedRunner:
    """Prices plans and lets the clock pass: a device that works off its plans one after another.

    At the engine's depth 1 a plan is made and dispatched while the one before it still runs. The clock passes until a plan is
    done when its result is collected.
    """

    def __init__(self, prices: Prices, clock: VirtualClock) -> None:
        self._prices, self._clock = prices, clock
        self._free_s = 0.0  # when everything that was submitted is done

    def forward(self, plan: StepPlan) -> PricedStep:
        compute_s, stall_s = self._prices(plan)
        now = self._clock.time
        self._free_s = max(now, self._free_s) + compute_s + stall_s
        drawn = [chunk.sample.forced or 0 for chunk in plan.chunks if chunk.sample is not None]
        return PricedStep(tuple(drawn), now, self._free_s)

    def sample(self, forward: PricedStep, masks: Masks) -> PricedStep:
        return forward

    def collect(self, ticket: PricedStep) -> StepResult:
        self._clock.time = max(self._clock.time, ticket.done_s)
        return StepResult(ticket.tokens, self._clock.time - ticket.submitted_s)

    def reset(self) -> None:
        """Nothing is kept."""
