"""Ours: copy paused contexts to the host while the link is idle, keep the device copy, lose pages only on demand.

A page with a host copy is clean: dropping it is free and instant. So memory that nobody wants is not wasted, and memory that
somebody wants is there at once. What is expected back last is copied first and dropped first.
"""

from collections.abc import Iterable, Iterator
from typing import final

from jinfercept.kv.page import Residency
from jinfercept.sched.estimator import Estimator, remaining_s
from jinfercept.sched.policy import Action, Budget, Move
from jinfercept.sched.sequence import Sequence, State


@final
class CopyAhead:
    """Spend the free link budget on copies of paused contexts; evict on demand.

    Args:
        estimator: how long an interception still lasts.
    """

    requeues_at_tail = False
    protects_paused = False
    synchronous = False

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._resident: dict[str, Sequence] = {}  # paused, and may have pages on the device
        self._dirty: dict[str, Sequence] = {}  # paused, and may have pages there without a host copy

    def pause(self, sequence: Sequence, now: float) -> None:
        self._resident[sequence.id] = self._dirty[sequence.id] = sequence

    def resume(self, sequence: Sequence, now: float) -> None:
        self._resident.pop(sequence.id, None)
        self._dirty.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float) -> Iterable[Move]:
        """Copies, longest expected remaining first."""
        if budget.link_tokens <= 0 or not self._dirty:
            return
        for sequence in self._last_expected_first(self._dirty.values(), now):
            for page in sequence.context.pages:
                if page.residency is Residency.DIRTY and not page.refs:
                    yield Move(sequence, page, Action.COPY, "copy ahead")
                    if page.host is None:
                        return  # the link or the host is full
            del self._dirty[sequence.id]

    def victims(self, now: float) -> Iterator[Move]:
        """Clean pages of whoever is expected back last, then dirty ones in the same order, tail first."""
        order = self._last_expected_first(self._resident.values(), now)
        for wanted, why in ((Residency.CLEAN, "clean"), (Residency.DIRTY, "dirty")):
            for sequence in order:
                resident = False
                for page in reversed(sequence.context.pages):
                    if page.device is not None:
                        resident = True
                        if page.residency is wanted and not page.refs:
                            yield Move(sequence, page, Action.SWAP, why)
                if not resident:
                    self._resident.pop(sequence.id, None)

    def _last_expected_first(self, sequences: Iterable[Sequence], now: float) -> list[Sequence]:
        """Intercepted ones by expected remaining time, then those that wait to run, youngest first."""

        def key(sequence: Sequence) -> tuple[bool, float]:
            if sequence.state is not State.INTERCEPTED:
                return True, -sequence.order
            age = now - sequence.paused_s
            return False, -remaining_s(self._estimator, sequence, age)

        return sorted(sequences, key=key)
