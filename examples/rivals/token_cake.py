"""TokenCake's offload during calls, with an upload before the predicted return (Bian et al., arXiv 2510.18586).

While a tool runs, its context may leave the device, if the tool is predicted to last longer than moving the context out and
back and if the device is short of memory. It is brought back so long before the predicted return as the link needs.
"""

from examples.rivals.host_tier import HostTier, Rank, host_tokens
from jinfercept.sched.policies import PolicyInputs
from jinfercept.sched.policy import Budget, Mover
from jinfercept.sched.sequence import PendingCall, Sequence, State

SMOOTHING = 0.5
"""Weight of the last duration in a tool's prediction."""
UNKNOWN_S = 1.0
"""Prediction for a tool that has not been called before, without a hint."""
SHORT = 0.6
"""Share of the device from which on contexts are offloaded."""
MARGIN = 2.0
"""Times of moving a context out and back that a call must last longer than they take."""
LEAD_S = 0.1
"""Seconds that an upload begins before it must."""


class PredictiveUpload(HostTier):
    """Loses contexts whose calls are predicted to last before the others, each by recency, and uploads them in time.

    An offloaded context keeps its pages on the device until their slots are needed. One that was uploaded and does not return
    may be evicted first once its call has lasted twice the predicted seconds.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self.predicted_s: dict[str, float] = {}  # of tools
        self.back_s: dict[str, float] = {}  # when paused contexts are expected back
        self.offloaded: set[str] = set()
        self.uploaded: set[str] = set()  # since they paused

    def pause(self, sequence: Sequence, now: float) -> None:
        super().pause(sequence, now)
        if sequence.state is State.INTERCEPTED:
            seconds = max(map(self._prediction_s, sequence.awaited), default=UNKNOWN_S)
            self.back_s[sequence.id] = sequence.paused_s + seconds
            used = 1.0 - self.pools.free / max(1, self.pools.total)
            moved_s = 2.0 * self.inputs.cost.swap_s(len(sequence.tokens))
            if used >= SHORT and seconds - moved_s > MARGIN * moved_s:
                self.offloaded.add(sequence.id)

    def resume(self, sequence: Sequence, now: float) -> None:
        super().resume(sequence, now)
        self.back_s.pop(sequence.id, None)
        self.offloaded.discard(sequence.id)
        self.uploaded.discard(sequence.id)

    def returned(self, sequence: Sequence, seconds: float) -> None:
        for call in sequence.calls:
            before_s = self.predicted_s.get(call.name, seconds)
            self.predicted_s[call.name] = before_s + SMOOTHING * (seconds - before_s)

    def rank(self, sequence: Sequence, now: float) -> Rank:
        gives_way = sequence.id in self.offloaded and not self._is_due(sequence, now)
        return (float(not gives_way), sequence.paused_s)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        super().moves(budget, now, mover)
        due = [other for other in self.paused.values() if other.id not in self.uploaded and self._is_due(other, now)]
        for sequence in sorted(due, key=lambda sequence: self.back_s[sequence.id]):
            if host_tokens(sequence):
                others = self.lost_first(self.paused.values(), now)
                offloaded = [other for other in others if other.id in self.offloaded and not self._is_due(other, now)]
                self.make_room(sequence, offloaded, mover)
                if not mover.fetch(sequence, "predicted to return"):
                    return
            self.uploaded.add(sequence.id)

    def _is_due(self, sequence: Sequence, now: float) -> bool:
        """Whether an intercepted sequence is so close to its predicted return that its upload has to begin."""
        back_s = self.back_s.get(sequence.id)
        if back_s is None or sequence.state is not State.INTERCEPTED:
            return False
        begins_s = back_s - self.inputs.cost.swap_s(len(sequence.tokens)) - LEAD_S
        return begins_s <= now < 2.0 * back_s - sequence.paused_s

    def _prediction_s(self, call: PendingCall) -> float:
        """Of a hint and the durations so far, their mean."""
        known_s = [seconds for seconds in (call.expected_s, self.predicted_s.get(call.name)) if seconds is not None]
        return sum(known_s) / len(known_s) if known_s else UNKNOWN_S
