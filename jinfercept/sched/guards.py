"""Checks around policies, estimators and orders of users: an error names the object that raised or answered wrongly.

The built-in ones run without a guard. A move that cannot be executed, such as one of a page in use, is no mistake: the
scheduler refuses it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final, get_type_hints

from jinfercept.errors import PluginError, describe_failure, is_users_interrupt
from jinfercept.kv.context import bounds
from jinfercept.sched.plugins import build_plugin, check_name, is_place, label, methods_of, source_line
from jinfercept.sched.policy import Action, Move, Mover
from jinfercept.sched.sequence import Sequence

_ALLOWED = {
    "moves": frozenset(Action),
    "victims": frozenset({Action.DROP, Action.SWAP, Action.OFFLOAD, Action.LOSE}),
    "host_victims": frozenset({Action.UNCOPY, Action.LOSE}),
}

_NUMBERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "key": (math.isfinite, "finite number"),
    "remaining_s": (lambda answer: answer >= 0.0, "number from 0 to inf"),  # false for NaN
}
"""The methods that answer a number: a test of the number, and its noun."""

_END: Any = object()


def make_choice[N, T](
    what: str,
    choice: object,
    names: Mapping[str, Callable[..., N]],
    protocol: type[T],
    built_in: Collection[object],
    *inputs: object,
) -> N | T:
    """The object that a choice means: guarded unless it is built in. Raises `ConfigError` for an unknown name, or as
    `build_plugin`."""
    if isinstance(choice, str) and not is_place(choice):
        check_name(what, choice, names)
        return names[choice](*inputs)
    made = build_plugin(what, choice, protocol, *inputs)
    name = label(choice if isinstance(choice, str) else made)
    return made if type(made) in built_in else guard(what, made, protocol, name)


def guard[T](what: str, plugin: T, protocol: type[T], name: str) -> T:
    """A user's object behind a check; `what` is its noun in errors, such as "policy". An object with a guard stays as it is."""
    return plugin if isinstance(plugin, Guard) else cast(T, Guard(f"{what} {name}", plugin, protocol))


@final
class Guard:
    """The attributes and methods of a Protocol, as a user's object has them; `plugin` names the object in errors.

    Any method raises `PluginError` if the object raised, answered no number in the method's range or no move of the
    sequence's pages, or offered the same move of a page twice in one order.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, plugin: str, value: object, protocol: type) -> None:
        self._plugin = plugin
        for name, hint in get_type_hints(protocol).items():
            constant = getattr(value, name)
            setattr(self, name, hint(constant))
        for name in methods_of(protocol):
            setattr(self, name, partial(self._ask, name, getattr(value, name)))

    def _ask(self, name: str, method: Callable[..., object], *arguments: Any, clean: bool = True) -> object:
        if name == "observe":
            arguments = *arguments[:2], *(arguments[2:] or (clean,))  # the default is the Protocol's, not the object's
        if name == "moves":
            budget, now, mover = arguments
            arguments = budget, now, _GuardedMover(mover, self._plugin)
        answer: Any = self._tried(name, method, *arguments)
        if name in ("victims", "host_victims"):
            return self._checked(name, answer)
        if name in _NUMBERS:
            is_right, noun = _NUMBERS[name]
            try:
                if is_right(answer):
                    return answer if isinstance(answer, int) else float(answer)
            except (TypeError, ValueError, OverflowError):
                pass
            raise PluginError(self._plugin, f"answers {answer!r:.80} in {name}, which is no {noun}")
        if name == "moves" and answer is not None:
            raise PluginError(self._plugin, f"answers {answer!r:.80} in moves, which moves pages through its mover")
        return bool(answer) if name == "admits" else None

    def _checked(self, method: str, moves: object) -> Iterator[Move]:
        check = _MoveCheck(_ALLOWED[method])
        iterator: Iterator[Any] = self._tried(method, iter, moves)
        while (move := self._tried(method, next, iterator, _END)) is not _END:
            if problem := check(move):
                raise PluginError(self._plugin, f"answers {problem} in {method}")
            yield move

    def _tried(self, name: str, method: Callable[..., Any], *arguments: object) -> Any:
        try:
            return method(*arguments)
        except PluginError:  # of another method, which this one has called through a mover
            raise
        except BaseException as error:
            if is_users_interrupt(error):
                raise
            problem = f"raises {describe_failure(error)} in {name}{source_line(error, __file__)}"
            raise PluginError(self._plugin, problem) from error


@final
class _GuardedMover(Mover):
    def __init__(self, mover: Mover, plugin: str) -> None:
        self._mover, self._plugin, self._check = mover, plugin, _MoveCheck(_ALLOWED["moves"])

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        problem = self._check(Move(sequence, range(0) if pages is None else pages, action, why))
        if problem:
            raise PluginError(self._plugin, f"moves {problem} in moves")
        return self._mover.move(sequence, action, why, pages)


@final
class _MoveCheck:
    def __init__(self, allowed: frozenset[Action]) -> None:
        self._allowed = allowed
        self._offered: dict[tuple[str, Action], list[range]] = {}

    # the problem with a move; "" if there is none
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
