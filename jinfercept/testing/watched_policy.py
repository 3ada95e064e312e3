"""A policy that watches another one for what the engine would put up with, or could not find out: see `Policy`."""

from collections.abc import Callable, Iterable, Iterator
from typing import final

from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State


class PolicyCheckError(AssertionError):
    """A policy breaks a rule of `Policy`."""


@final
class WatchedPolicy(Policy):
    """Passes everything on, and raises `PolicyCheckError` where a rule is broken.

    A sequence and its pages may not be written to, and an order of eviction ends only when every page was offered whose slot
    can be taken; pages that contexts share are the scheduler's.

    Args:
        policy: the one to watch.
        name: of it, for errors.

    Attributes:
        problem: the first rule that was broken.
        num_moves: moves that were offered.
    """

    def __init__(self, policy: Policy, name: str) -> None:
        self.requeues_at_tail = policy.requeues_at_tail
        self.protects_paused = policy.protects_paused
        self.synchronous = policy.synchronous
        self.recomputes_late = policy.recomputes_late
        self.problem: PolicyCheckError | None = None
        self.num_moves = 0
        self._policy, self._name = policy, name
        self._known: dict[str, Sequence] = {}
        self._paused: dict[str, Sequence] = {}
        self._changes = 0
        self._shared: dict[str, set[int]] = {}  # indexes of pages that several contexts had, by sequence

    def pause(self, sequence: Sequence, now: float) -> None:
        self._known[sequence.id] = self._paused[sequence.id] = sequence
        self._changes += 1
        self._note_shared()
        self._unwritten("pause", lambda: self._policy.pause(sequence, now))

    def wait(self, sequence: Sequence) -> None:
        self._changes += 1
        self._unwritten("wait", lambda: self._policy.wait(sequence))

    def resume(self, sequence: Sequence, now: float) -> None:
        self._known[sequence.id] = sequence
        self._paused.pop(sequence.id, None)
        self._changes += 1
        self._note_shared()
        self._unwritten("resume", lambda: self._policy.resume(sequence, now))
        if sequence.state is State.FINISHED:
            self._known.pop(sequence.id)
            self._shared.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._changes += 1
        watched = _WatchedMover(self, mover)
        self._policy.moves(budget, now, watched)
        self.compare(watched.before, "moves")

    def victims(self, now: float) -> Iterator[Move]:
        self._note_shared()
        changes = self._changes
        offered = {name: set(indexes) for name, indexes in self._shared.items()}
        for move in self._unwritten_each("victims", lambda: self._policy.victims(now)):
            offered.setdefault(move.sequence.id, set()).update(move.pages)
            yield move
        if changes != self._changes:
            return  # an order that was begun before the last pause need not know of it
        for sequence in self._paused.values():
            evictable = [run.pages for run in sequence.context.runs() if run.evictable]
            left = set[int]().union(*evictable) - offered.get(sequence.id, set())
            if left:
                doing = "waits for its calls" if sequence.state is State.INTERCEPTED else "waits to run"
                self._fail(
                    f"keeps page {min(left)} of request {sequence.id}, which {doing}: `victims` ends without it, while a "
                    f"running request needs a slot; it must offer every page of every paused request in the end"
                )

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return self._unwritten_each("host_victims", lambda: self._policy.host_victims(sequence, now))

    def held_pages(self, most: int, now: float) -> int:
        return self._unwritten("held_pages", lambda: self._policy.held_pages(most, now))

    def admits(self, sequence: Sequence, now: float) -> bool:
        return self._unwritten("admits", lambda: self._policy.admits(sequence, now))

    def _note_shared(self) -> None:
        for sequence in self._paused.values():
            shared = self._shared.setdefault(sequence.id, set())
            for run in sequence.context.runs():
                if run.shared:
                    shared.update(run.pages)

    def states(self) -> "_States":
        """The fields of every sequence that the policy can see."""
        return [(sequence, _state_of(sequence)) for sequence in self._known.values()]

    def compare(self, before: "_States", method: str) -> None:
        """Raise `PolicyCheckError` if a sequence has another state than before."""
        for sequence, was in before:
            now = _state_of(sequence)
            if was != now:
                changed = [part for part, old, new in zip(_STATE, was, now, strict=True) if old != new]
                self._fail(f"writes to request {sequence.id} in `{method}`: its {', '.join(changed)}; it may only read")

    def _unwritten[T](self, method: str, call: Callable[[], T]) -> T:
        before = self.states()
        answer = call()
        self.compare(before, method)
        return answer

    def _unwritten_each(self, method: str, call: Callable[[], Iterable[Move]]) -> Iterator[Move]:
        left = iter(self._unwritten(method, call))
        while (move := self._unwritten(method, lambda: next(left, None))) is not None:
            self.num_moves += 1
            yield move

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or PolicyCheckError(f"the policy {self._name} {problem}")
        raise self.problem


@final
class _WatchedMover(Mover):
    """Passes every move on, and looks at what the policy wrote since the one before.

    Attributes:
        before: states of the sequences after the last move.
    """

    def __init__(self, watch: WatchedPolicy, mover: Mover) -> None:
        self._watch, self._mover, self.before = watch, mover, watch.states()

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        self._watch.compare(self.before, "moves")
        self._watch.num_moves += 1
        moved = self._mover.move(sequence, action, why, pages)
        self.before = self._watch.states()
        return moved


type _States = list[tuple[Sequence, tuple[object, ...]]]


_STATE = ("state", "order", "tokens", "counts of tokens", "calls", "pages")


def _state_of(sequence: Sequence) -> tuple[object, ...]:
    """The fields of a sequence that a policy can see, in the order of `_STATE`."""
    return (
        sequence.state,
        sequence.order,
        len(sequence.tokens),
        (sequence.pending, sequence.generated, sequence.max_tokens),
        (sequence.calls, sequence.awaited, sequence.paused_s),
        sequence.context.runs(),
    )
