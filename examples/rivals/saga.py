"""SAGA's workflow-aware LRU with a time to live (Guo, Wu and Yiu, arXiv 2605.00528), for one worker and one tenant.

A paused context is protected for a time to live: the 95th percentile of its tool's durations, less under memory pressure, 300 s
at most. Of the contexts that are not protected the one with the greatest `α·recency + β·(1 − P_reuse) + γ·size` is lost first.
"""

import math
from statistics import NormalDist

from examples.rivals.host_tier import HostTier, Rank
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.sequence import Sequence, State

RECENCY, REUSE, SIZE = 0.3, 0.5, 0.2
"""α, β and γ (equation 6)."""
PERCENTILE, LONGEST_S = 0.95, 300.0
LOW, HIGH, LESS = 0.7, 0.9, 0.5
"""Shares of the device between which the time to live falls by `LESS`."""
SMOOTHING = 0.1
"""Weight of the last duration in a tool's log-normal distribution."""
FIRST_S, FIRST_SIGMA = 1.0, 1.0
"""Median, and sigma, of a tool that has not been called before."""
MOST_TURNS = 256
"""Turns from which on sessions count as equally far."""

_SIGMAS = NormalDist().inv_cdf(PERCENTILE)


class WorkflowLRU(HostTier):
    """Loses the context of greatest eviction score whose time to live is over; protected ones afterwards."""

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.until_s: dict[str, float] = {}
        self.turns: dict[str, int] = {}  # of each session
        self.paused_after = [0] * (MOST_TURNS + 1)  # sessions that have paused after so many turns
        self.went_on_after = [0] * (MOST_TURNS + 1)  # those of them that had another turn
        self.new_tokens = 0.0  # mean of a turn
        self.logs: dict[str, tuple[float, float]] = {}  # mean and variance of a tool's log durations
        self._length: dict[str, int] = {}  # of a session at its last pause

    def pause(self, sequence: Sequence, now: float) -> None:
        again = sequence.id in self.paused  # preempted, then paused
        super().pause(sequence, now)
        if sequence.state is State.INTERCEPTED and not again:
            self.until_s[sequence.id] = sequence.paused_s + self.ttl_s(sequence)
            turn = self.turns[sequence.session] = min(self.turns.get(sequence.session, 0) + 1, MOST_TURNS)
            self.paused_after[turn] += 1
            self._length[sequence.session] = len(sequence.tokens)

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        self.until_s.pop(sequence.id, None)

    def returned(self, sequence: Sequence, seconds: float) -> None:
        self.went_on_after[self.turns.get(sequence.session, 0)] += 1
        grown = len(sequence.tokens) - self._length.get(sequence.session, len(sequence.tokens))
        self.new_tokens += SMOOTHING * (max(0, grown) - self.new_tokens)
        for call in sequence.calls:
            mean, variance = self._logs(call.name)
            log_s = math.log(max(seconds, 1e-3))
            mean += SMOOTHING * (log_s - mean) if call.name in self.logs else log_s - mean
            self.logs[call.name] = mean, variance + SMOOTHING * ((log_s - mean) ** 2 - variance)

    def ttl_s(self, sequence: Sequence) -> float:
        """The time to live of a context that has just paused."""
        pools = self.pools
        used = 1.0 - (pools.free + pools.cached) / max(1, pools.total)
        pressure = min(1.0, max(0.0, (used - LOW) / (HIGH - LOW)))
        logs = [self._logs(call.name) for call in sequence.awaited]
        percentile_s = max((math.exp(mean + _SIGMAS * math.sqrt(variance)) for mean, variance in logs), default=0.0)
        return min(percentile_s * (1.0 - LESS * pressure), LONGEST_S)

    def reuse(self, sequence: Sequence) -> float:
        """P_reuse: sessions with as many turns that went on, as far as their prompts were the contexts that they had."""
        turn, tokens = self.turns.get(sequence.session, 0), len(sequence.tokens)
        goes_on = (self.went_on_after[turn] + 1) / (self.paused_after[turn] + 1)
        return min(1.0, goes_on) * tokens / (tokens + max(1.0, self.new_tokens))

    def rank(self, sequence: Sequence, now: float) -> Rank:
        ages_s = [now - other.paused_s for other in self.paused.values()]
        most = max(len(other.tokens) for other in self.paused.values())
        recency = (now - sequence.paused_s) / max(1.0, *ages_s)
        score = RECENCY * recency + REUSE * (1.0 - self.reuse(sequence)) + SIZE * len(sequence.tokens) / most
        return (float(self.until_s.get(sequence.id, 0.0) > now), -score)

    def _logs(self, tool: str) -> tuple[float, float]:
        return self.logs.get(tool, (math.log(FIRST_S), FIRST_SIGMA**2))
