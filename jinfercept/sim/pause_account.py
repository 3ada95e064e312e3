"""The waste of one pause of a request, measured (memory held, recomputation, stalls), and a policy's decision about it.

In token·seconds of device memory, comparable with the waste equations. Only tokens that no other context shares count.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.kv.context import ContextResidency
from jinfercept.meter.decisions import DecisionCase
from jinfercept.sched.policy import Action
from jinfercept.sched.sequence import Sequence
from jinfercept.sim.forecast import Forecast


class Prediction(NamedTuple):
    """Predicted waste of a whole pause in token·seconds, and the pause's age in seconds at the prediction."""

    age_s: float
    token_s: float


class PauseCost(NamedTuple):
    """Measured waste of a pause, in token·seconds. The seconds of a step divide as in `meter.ledger`.

    Attributes:
        held: own tokens on the device, from the pause to the return; equation (2) predicts it.
        recompute: own tokens for the steps that recompute some of them, other running contexts for the growth of these steps;
            equation (4).
        fetch: own tokens for the other steps from admission to the next token, which wait for copies from the host; equation
            (5) takes a swap within the link budget as free.
        stall: contexts of all running sequences, for the seconds in which steps wait for this pause's copies; equation (3).
            These seconds are in none of the other parts.
        queued: own tokens on the device, from the return to admission. No equation has it.
    """

    held: float
    recompute: float
    fetch: float
    stall: float
    queued: float

    @property
    def token_s(self) -> float:
        """The sum of the parts that equations predict: all but `queued`."""
        return self.held + self.recompute + self.fetch + self.stall


class PauseAccount:
    """Adds up the waste of one pause of one sequence, an interception or a preemption. Mutable, owned by a `DecisionLog`.

    Args:
        number: its interceptions so far, this one included.
        intercepted: False for a preemption.
        now: seconds of the engine's clock at its start.
    """

    def __init__(self, sequence: Sequence, number: int, *, intercepted: bool, now: float) -> None:
        self.sequence, self.number, self.intercepted = sequence, number, intercepted
        self.began_s = self._since_s = now
        self.context, self.state_tokens = sequence.context.own_tokens, sequence.context.state_tokens
        self._resident = self.context + self.state_tokens
        self.held = 0.0  # token·seconds from the pause to the return, up to the last settlement
        self._queued = self._recompute = self._fetch = self._stall = 0.0
        self._recomputed, self._copied_in = sequence.usage.recomputed, sequence.usage.copied_in
        self.recomputed = 0  # tokens, until now
        self.untouched = True  # nothing was done to it
        self.returned_s: float | None = None
        self.call_s: float | None = None  # how long its last call lasted, if all ended by themselves
        self.resumed: ContextResidency | None = None  # where its context was when it ran again
        self.prediction: Prediction | None = None
        self.forecasts: list[Forecast] = []

    def settle(self, now: float) -> None:
        """Add what the context has held until now."""
        token_s = self._resident * (now - self._since_s)
        self._since_s = now
        if self.returned_s is None:
            self.held += token_s
        else:
            self._queued += token_s

    def touch(self, now: float, resident: int) -> None:
        """A move begins: `resident` own tokens are on the device."""
        self.settle(now)
        self._resident = resident
        self.untouched = False

    def lose(self, tokens: int) -> None:
        """Own tokens leave the device; call `touch` first."""
        self._resident = max(0, self._resident - tokens)

    def return_at(self, now: float) -> None:
        self.settle(now)
        self.returned_s = now

    def run_at(self, now: float) -> bool:
        """The sequence runs again; True if some of its tokens must be fetched or recomputed."""
        self.settle(now)
        self._resident = 0
        self.resumed = self.sequence.context.residency(self.sequence.max_computed)
        return self.resumed.host + self.resumed.missing > 0

    def take_recomputed(self) -> int:
        """Tokens of the sequence that were recomputed since the last call."""
        tokens = self.sequence.usage.recomputed - self._recomputed
        self._recomputed = self.sequence.usage.recomputed
        self.recomputed += tokens
        return tokens

    def take_copied_in(self) -> int:
        """Tokens of the sequence that were fetched from the host since the last call."""
        tokens = self.sequence.usage.copied_in - self._copied_in
        self._copied_in = self.sequence.usage.copied_in
        return tokens

    def pay(self, *, recompute: float = 0.0, fetch: float = 0.0, stall: float = 0.0) -> None:
        """Add a step's token·seconds."""
        self._recompute += recompute
        self._fetch += fetch
        self._stall += stall

    @property
    def cost(self) -> PauseCost:
        """The waste so far."""
        return PauseCost(self.held, self._recompute, self._fetch, self._stall, self._queued)


@dataclass(slots=True)
class Decision:
    """Moves of one context with one action and one reason, in one plan. Numbers are tokens, but for `pages`.

    Attributes:
        copied: copied to the host.
        freed_clean: dropped from the device, with a host copy.
        freed_dirty: dropped from the device, without one.
    """

    pause: PauseAccount
    case: DecisionCase
    action: Action
    why: str
    pages: int = 0
    tokens: int = 0
    copied: int = 0
    freed_clean: int = 0
    freed_dirty: int = 0
