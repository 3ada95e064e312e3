"""Policies, estimators and orders of users behind a check: whatever these raise or answer, the error names them.

The built-in ones run without a guard. A move that cannot be executed, such as one of a page that is in use, is no mistake: the
scheduler refuses it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from jinfercept.errors import ConfigError, PluginError, describe_failure, is_users_interrupt, shown
from jinfercept.kv.context import bounds
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.order import Order
from jinfercept.sched.plugins import source_line
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import PendingCall, Sequence

_ALLOWED = {
    "moves": frozenset(Action),
    "victims": frozenset({Action.DROP, Action.SWAP, Action.OFFLOAD, Action.LOSE}),
    "host_victims": frozenset({Action.UNCOPY, Action.LOSE}),
}

_END: Any = object()


@final
class GuardedPolicy(Policy):
    """A user's policy.

    Args:
        policy: of the right shape.
        name: of the policy, for errors.

    Raises:
        PluginError: from any method: the policy raised, or answered what is no move of pages of that sequence, or the same
            move of a page twice, in one order.
    """

    def __init__(self, policy: Policy, name: str) -> None:
        self.requeues_at_tail = bool(policy.requeues_at_tail)
        self.protects_paused = bool(policy.protects_paused)
        self.synchronous = bool(policy.synchronous)
        self.recomputes_late = bool(policy.recomputes_late)
        self._policy = policy
        self._call = _Calls(f"policy {name}")

    def pause(self, sequence: Sequence, now: float) -> None:
        self._call("pause", self._policy.pause, sequence, now)

    def wait(self, sequence: Sequence) -> None:
        self._call("wait", self._policy.wait, sequence)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._call("resume", self._policy.resume, sequence, now)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        answer: object = self._call("moves", self._policy.moves, budget, now, _GuardedMover(mover, self._call.plugin))
        if answer is not None:
            raise PluginError(
                self._call.plugin, f"answers {answer!r:.80} in moves, which moves pages through its mover"
            )

    def victims(self, now: float) -> Iterator[Move]:
        return self._checked("victims", self._call("victims", self._policy.victims, now))

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return self._checked("host_victims", self._call("host_victims", self._policy.host_victims, sequence, now))

    def held_pages(self, most: int, now: float) -> int:
        num_pages = self._call("held_pages", self._policy.held_pages, most, now)
        if not isinstance(num_pages, int) or num_pages < 0:  # pyright: ignore[reportUnnecessaryIsInstance] # a user's method
            raise PluginError(
                self._call.plugin, f"answers {num_pages!r:.80} in held_pages, which is no number of pages"
            )
        return num_pages

    def admits(self, sequence: Sequence, now: float) -> bool:
        return bool(self._call("admits", self._policy.admits, sequence, now))

    def _checked(self, method: str, moves: Iterable[Move]) -> Iterator[Move]:
        check = _MoveCheck(_ALLOWED[method])
        iterator: Iterator[Any] = self._call(method, lambda: iter(moves))
        while (move := self._call(method, lambda: next(iterator, _END))) is not _END:
            if problem := check(move):
                raise PluginError(self._call.plugin, f"answers {problem} in {method}")
            yield move


@final
class _GuardedMover(Mover):
    """Passes on what is a move of pages of a sequence."""

    def __init__(self, mover: Mover, plugin: str) -> None:
        self._mover, self._plugin, self._check = mover, plugin, _MoveCheck(_ALLOWED["moves"])

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        problem = self._check(Move(sequence, range(0) if pages is None else pages, action, why))
        if problem:
            raise PluginError(self._plugin, f"moves {problem} in moves")
        return self._mover.move(sequence, action, why, pages)


@final
class _MoveCheck:
    """The problem with a move of one order; "" if there is none."""

    def __init__(self, allowed: frozenset[Action]) -> None:
        self._allowed = allowed
        self._offered: dict[tuple[str, Action], list[range]] = {}

    def __call__(self, move: object) -> str:
        if not isinstance(move, Move) or not isinstance(move.sequence, Sequence):
            return f"{move!r:.80}, which is no Move of pages of a sequence,"
        sequence, pages, action, _ = move
        if not isinstance(pages, range) or pages.step not in (1, -1):  # pyright: ignore[reportUnnecessaryIsInstance] # a user's
            return (
                f"{pages!r:.80} as pages of request {sequence.id}; a move names them by a range of their indexes, such as "
                "`sequence.context.tail_first`,"
            )
        if action not in self._allowed:
            allowed = [str(action) for action in Action if action in self._allowed]
            return f"{action!s:.80} for request {sequence.id}, which is none of {', '.join(allowed)},"
        first, end = bounds(pages)
        if first < 0 or end > sequence.context.num_pages:
            return (
                f"{pages} as pages of request {sequence.id}, which is {sequence.state.value} and has "
                f"{sequence.context.num_pages},"
            )
        offered = self._offered.setdefault((sequence.id, action), [])
        for offered_pages in offered:
            if first < offered_pages.stop and offered_pages.start < end:
                return f"{action} of page {max(first, offered_pages.start)} of request {sequence.id} twice in one order"
        offered.append(range(first, end))
        return ""


@final
class GuardedEstimator(Estimator):
    """A user's estimator.

    Args:
        estimator: of the right shape.
        name: of the estimator, for errors.

    Raises:
        PluginError: from any method: the estimator raised, or answered what is no number of its range.
    """

    def __init__(self, estimator: Estimator, name: str) -> None:
        self._estimator = estimator
        self._call = _Calls(f"estimator {name}")

    def started(self, call: PendingCall, at_s: float) -> None:
        self._call("started", self._estimator.started, call, at_s)

    def observe(self, call: PendingCall, duration_s: float, clean: bool = True) -> None:
        self._call("observe", self._estimator.observe, call, duration_s, clean)

    def duration_s(self, call: PendingCall, age_s: float) -> float:
        return self._number("duration_s", self._estimator.duration_s, call, age_s)

    def remaining_s(self, call: PendingCall, age_s: float) -> float:
        return self._number("remaining_s", self._estimator.remaining_s, call, age_s)

    def seconds_per_return(self, call: PendingCall, age_s: float) -> float:
        return self._number("seconds_per_return", self._estimator.seconds_per_return, call, age_s)

    def survival(self, call: PendingCall, age_s: float, horizon_s: float) -> float:
        return self._number("survival", self._estimator.survival, call, age_s, horizon_s, most=1.0)

    def hold_until_s(self, call: PendingCall, hold_cost_per_s: float, leave_cost: float) -> float:
        return self._number("hold_until_s", self._estimator.hold_until_s, call, hold_cost_per_s, leave_cost)

    def _number(self, name: str, method: Callable[..., float], *arguments: object, most: float = float("inf")) -> float:
        number = self._call(name, method, *arguments)
        try:
            if 0.0 <= number <= most:  # false for NaN
                return float(number)
        except (TypeError, ValueError):
            pass
        raise PluginError(self._call.plugin, f"answers {number!r:.80} in {name}, which is no number from 0 to {most:g}")


@final
class GuardedOrder(Order):
    """A user's order.

    Args:
        order: of the right shape.
        name: of the order, for errors.

    Raises:
        ConfigError: from the constructor: `patience` is no whole number from 0 on.
        PluginError: from any method: the order raised, or answered what is no finite number.
    """

    def __init__(self, order: Order, name: str) -> None:
        patience: object = order.patience
        if not isinstance(patience, int) or patience < 0:
            raise ConfigError(
                f"the order {name} has a patience that is no number of overtakings",
                got=shown(patience),
                fix="a whole number, at least 0",
            )
        self.patience, self.in_seconds = patience, bool(order.in_seconds)
        self._order = order
        self._call = _Calls(f"order {name}")

    def key(self, sequence: Sequence, now: float) -> float:
        key = self._call("key", self._order.key, sequence, now)
        try:
            if math.isfinite(key):
                return float(key)
        except (TypeError, ValueError, OverflowError):
            pass
        raise PluginError(self._call.plugin, f"answers {key!r:.80} in key, which is no finite number")

    def intercepted(self, sequence: Sequence) -> None:
        self._call("intercepted", self._order.intercepted, sequence)

    def finished(self, sequence: Sequence) -> None:
        self._call("finished", self._order.finished, sequence)


@final
class _Calls:
    """Calls methods of a plugin; what they raise becomes a `PluginError` with the method and the line."""

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin

    def __call__[T](self, name: str, method: Callable[..., T], *arguments: object) -> T:
        try:
            return method(*arguments)
        except PluginError:  # of another method, which this one has called through a mover
            raise
        except BaseException as error:
            if is_users_interrupt(error):
                raise
            problem = f"raises {describe_failure(error)} in {name}{source_line(error, __file__)}"
            raise PluginError(self.plugin, problem) from error
