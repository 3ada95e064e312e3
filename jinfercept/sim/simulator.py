"""A virtual clock, and a runner that prices plans instead of executing them: what the engine runs on in a simulation.

No JAX and no model: a simulated model writes what a request's `forced_output_ids` say, and zeros behind them.
"""

from random import Random
from threading import Event
from typing import NamedTuple, final

from jinfercept.meter.prices import Prices
from jinfercept.sched.plan import Masks, StepPlan, StepResult


@final
class VirtualClock:
    """A clock whose time passes only by `wait`, or when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, wake: Event, timeout_s: float) -> None:
        """Advance the time at once."""
        self.time += timeout_s
        wake.clear()


class PricedStep(NamedTuple):
    """A plan that is not executed, from when to when it would be, and what a draft model would draft for it."""

    tokens: tuple[int, ...]
    submitted_s: float
    done_s: float
    drafts: tuple[tuple[int, ...], ...] = ()


@final
class PricedRunner:
    """Prices plans and lets the clock pass: a device that works off its plans one after another.

    At the engine's depth 1 a plan is made and dispatched while the one before it still runs.

    Args:
        clock: passes until a plan is done when its result is collected.
        accepted_share: chance that a draft is accepted if those before it are.
    """

    def __init__(self, prices: Prices, clock: VirtualClock, accepted_share: float = 0.0) -> None:
        self._prices, self._clock = prices, clock
        self._accepted_share, self._rng = accepted_share, Random(0)
        self._free_s = 0.0  # when everything that was submitted is done

    def forward(self, plan: StepPlan) -> PricedStep:
        """Price the plan, its sampling included."""
        compute_s, stall_s = self._prices(plan)
        now = self._clock.time
        self._free_s = max(now, self._free_s) + compute_s + stall_s
        drawn = list[int]()
        for chunk in plan.chunks:
            if chunk.sample is not None:
                if chunk.num_drafts:
                    drawn += [self._verified(max(0, draft)) for draft in chunk.drafts]
                drawn.append(chunk.sample.forced or 0)
        drafts = ()
        if plan.awaits_drafts:
            drafts = tuple([(0,) * chunk.num_drafts for chunk in plan.chunks if chunk.awaits_drafts])
        return PricedStep(tuple(drawn), now, self._free_s, drafts)

    def drafts(self, forward: PricedStep) -> tuple[tuple[int, ...], ...]:
        """Zeros, for every chunk that awaited drafts of a draft model."""
        return forward.drafts

    def _verified(self, draft: int) -> int:
        """The token that is drawn where there is a draft: the draft, or another one."""
        return draft if self._rng.random() < self._accepted_share else 1 - min(draft, 1)

    def sample(self, forward: PricedStep, masks: Masks) -> PricedStep:
        """Nothing is left to price."""
        return forward

    def collect(self, ticket: PricedStep) -> StepResult:
        self._clock.time = max(self._clock.time, ticket.done_s)
        return StepResult(ticket.tokens, self._clock.time - ticket.submitted_s)

    def reset(self) -> None:
        """Nothing is kept."""
