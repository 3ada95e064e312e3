"""MARS' feedback levels and warm returns (Wang et al., arXiv 2604.26963), from its authors' public preview.

Requests are served by levels of the prompt that they lack; a level is lost by long service and won back by waiting, so that
continuations with little to compute go first. New sessions wait for a window, which shrinks while the device is full.
A context is kept for a returning tool only if the return is expected to come sooner than computing it again would take.
"""

from examples.rivals.host_tier import HostTier, Rank
from jinfercept.sched.orders import Order
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Budget, Mover
from jinfercept.sched.sequence import Sequence, State

LEVELS = (2048, 8192, 32_768)
"""Tokens that a request lacks, up to which it is of a level."""
QUANTA = (2048, 1024, 512, 256)
"""Tokens of service after which a request loses its level."""
AGING_S = 30.0
"""Seconds of waiting that win a level back."""
WINDOW, LEAST_WINDOW = 30, 4
"""Sessions that may be live at first, and at least."""
SHRINK, CONTROL_S = 0.7, 0.2
"""The window shrinks by this factor, or grows by one, once in so many seconds."""
FULL, SLACK = 0.9, 0.85
"""Shares of the device in use from which the window shrinks, and up to which it grows."""


class WarmReturns(HostTier):
    """Keeps a context while its tool is expected back within the seconds that computing or loading it takes; of the others the
    one paused longest is lost first. New sessions wait for the window."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.window = float(WINDOW)
        self.live: dict[str, Sequence] = {}  # sessions that run, or wait for a tool that their answer called
        self.durations: dict[str, tuple[int, float]] = {}  # number and sum, by tool
        self._controlled_s = 0.0

    def returned(self, sequence: Sequence, seconds: float) -> None:
        for call in sequence.calls:
            count, total_s = self.durations.get(call.name, (0, 0.0))
            self.durations[call.name] = count + 1, total_s + seconds

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        self.live[sequence.session] = sequence

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        super().moves(budget, now, mover)
        self._control(now)

    def admits(self, sequence: Sequence, now: float) -> bool:
        self.plan(now)
        return sequence.session in self.live or len(self.live) < int(self.window)

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (float(self._is_warm(sequence, now)), sequence.paused_s)

    def _is_warm(self, sequence: Sequence, now: float) -> bool:
        """Whether the tool is expected back before the pin ends: the seconds that its warm return saves."""
        tokens, cost = len(sequence.tokens), self.inputs.cost
        saved_s = cost.recompute_s(tokens, self.inputs.saturation)
        if self.pools.host_total:
            saved_s = min(saved_s, cost.swap_s(tokens))
        expected_s = max((self._mean_s(call.name) for call in sequence.awaited if call.kind != "reader"), default=None)
        return expected_s is not None and expected_s <= saved_s and now - sequence.paused_s <= saved_s

    def _mean_s(self, tool: str) -> float:
        count, total_s = self.durations.get(tool, (0, 0.0))
        return total_s / count if count else 0.0

    def _control(self, now: float) -> None:
        """Shrink or grow the window, and forget the sessions that have ended."""
        if now - self._controlled_s < CONTROL_S:
            return
        self._controlled_s = now
        for name, sequence in list(self.live.items()):
            ended = sequence.state is State.INTERCEPTED and all(call.kind == "reader" for call in sequence.awaited)
            if ended or sequence.state is State.FINISHED:
                del self.live[name]
        in_use = self.pools.used / max(1, self.pools.total)
        if in_use >= FULL:
            self.window = max(float(LEAST_WINDOW), self.window * SHRINK)
        elif in_use <= SLACK:
            self.window = min(float(WINDOW), self.window + 1)


class FeedbackLevels(Order):
    """By the level of what a request lacks, or that of the service it has had if that is lower, with a level back for every
    30 s that it waits; within a level by arrival."""

    patience = 1 << 40  # aging bounds what a request is overtaken by

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._began: dict[str, int] = {}  # tokens that a request lacked at first

    def key(self, sequence: Sequence, now: float) -> float:
        since_s = self._since_s.setdefault(sequence.id, now)
        residency = sequence.context.residency(sequence.max_computed)
        lacking = sequence.length - residency.device - residency.host
        served = self._began.setdefault(sequence.id, lacking) - lacking
        level = max(level_of(lacking), service_level(served)) - int((now - since_s) / AGING_S)
        return max(0, level) * 1e9 + sequence.arrival_s

    def intercepted(self, sequence: Sequence) -> None:
        self.finished(sequence)

    def finished(self, sequence: Sequence) -> None:
        self._since_s.pop(sequence.id, None)
        self._began.pop(sequence.id, None)


def level_of(lacking: int) -> int:
    """The level of a request by the tokens that it lacks."""
    return sum(lacking > most for most in LEVELS)


def service_level(served: int) -> int:
    """The level of a request that has had so many tokens of service."""
    level = 0
    while level < len(QUANTA) - 1 and served >= QUANTA[level]:
        served -= QUANTA[level]
        level += 1
    return level
