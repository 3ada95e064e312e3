"""A user's own code in the engine: a policy, an estimator or a workload, given as a place, a class, a function or an object.

A *place* is `path.py:Name` or `package.module:Name`. Places come from the operator alone, as flags, keyword arguments or TOML
tables: no field of a request is ever loaded. The noun `what`, such as "policy", names the object in errors. A `Guard` checks
what a user's object answers; the built-in ones run without. A move that cannot be executed, such as one of a page in use, is
no mistake: the scheduler refuses it.
"""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast, final, get_type_hints

from jinfercept.errors import ConfigError, PluginError, describe_failure, is_users_interrupt, nearest
from jinfercept.kv.context import bounds
from jinfercept.sched.policy import Action, Move, Mover
from jinfercept.sched.sequence import Sequence


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def is_place(text: str) -> bool:
    """Whether a text is a place. Built-in names have no colon."""
    return ":" in text


def label(choice: object) -> str:
    """The name of a choice in reports and errors: a given name or place, else the name of the class or function."""
    if isinstance(choice, str):
        return choice
    named = choice if isinstance(choice, type) or inspect.isfunction(choice) else type(choice)
    return named.__name__


def check_name(what: str, name: str, names: Mapping[str, object]) -> None:
    if name not in names:
        fix = f"one of {', '.join(names)}; or your own, as path.py:Class or package.module:Class"
        raise ConfigError(f"no such {what}", got=name + nearest(name, list(names)), fix=fix)


def load_plugin(what: str, place: str) -> object:
    """The object at a place. A file runs at its first use, and again once it has changed.

    Raises `ConfigError` if there is no such file, module or name, or if it raises when it is imported.
    """
    home, _, name = place.rpartition(":")
    if not home or not name.isidentifier():
        fix = "path.py:Class or package.module:Class"
        raise ConfigError(f"{_a(what)} of your own must be named as FILE.py:CLASS or MODULE:CLASS", got=place, fix=fix)
    in_file = home.endswith(".py") or "/" in home
    module = _run_file(what, Path(home)) if in_file else _import(what, home)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [member for member in vars(module) if not member.startswith("_")]
        own = [member for member in public if getattr(vars(module)[member], "__module__", None) == module.__name__]
        got = f"{place}{nearest(name, public)}"
        raise ConfigError(f"no such {what}: {home} has no {name}", got=got, fix=f"one of {', '.join(own)}") from None


def build_plugin[T](what: str, choice: object, protocol: type[T], *inputs: object) -> T:
    """The object that a choice means: a place, a class, a function that makes an object, or the object itself.

    A class or a function is called with the inputs if it requires arguments, and without any if it requires none. Raises
    `ConfigError` as `load_plugin`, if calling it raises, if it takes other arguments, or if the object lacks a member of the
    Protocol.
    """
    name = label(choice)
    if isinstance(choice, str):
        choice = load_plugin(what, choice)
    if isinstance(choice, type) or (callable(choice) and not has_members(choice, protocol)):
        choice = _call(what, name, choice, inputs)
    check_shape(_a(what), choice, protocol)
    return choice  # pyright: ignore[reportReturnType] # it has the members


def source_line(error: BaseException, skipped: str) -> str:
    """The innermost line of an exception outside the file `skipped`, as ` (own.py, line 12)`; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != skipped]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _call(what: str, name: str, factory: Callable[..., Any], inputs: tuple[object, ...]) -> object:
    required = _required(factory)
    if len(required) not in (0, len(inputs)) or not all(map(_may_be, required, inputs)):
        takes = f"nothing or {', '.join(type(value).__name__ for value in inputs)}" if inputs else "nothing"
        got = f"{name}({', '.join(map(str, required))})"
        raise ConfigError(f"{_a(what)} is made with {takes}", got=got, fix="give its other arguments defaults")
    try:
        return factory(*inputs) if required else factory()
    except ConfigError:
        raise
    except Exception as error:  # it is the user's
        got = describe_failure(error) + source_line(error, __file__)
        raise ConfigError(
            f"the {what} {name} raised when it was made", got=got, fix="correct its constructor"
        ) from error


def _required(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # there is no signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds]


def _may_be(parameter: inspect.Parameter, value: object) -> bool:
    # only annotations that are classes are read
    hint = parameter.annotation
    return hint is parameter.empty or not isinstance(hint, type) or isinstance(value, hint)


def _import(what: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{home}.".startswith(f"{error.name}."):
            fix = "install it or set PYTHONPATH, or give its file: path.py:Class"
            raise ConfigError(f"no such module for {_a(what)}", got=home, fix=fix) from None
        raise _failed_import(what, home, error) from error


def _run_file(what: str, path: Path) -> ModuleType:
    try:
        stat, path = path.stat(), path.resolve()
    except OSError:
        raise ConfigError(f"no such file for {_a(what)}", got=path, fix="give the path of one that is there") from None
    name = f"jinfercept_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    state = (stat.st_mtime_ns, stat.st_size)
    ran = sys.modules.get(name)
    if ran is not None and getattr(ran, "__jinfercept_state__", None) == state:
        return ran
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"the file of {_a(what)} must be a Python file", got=path, fix="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    if (folder := str(path.parent)) not in sys.path:  # modules beside it can be imported, as of a script
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed_import(what, str(path), error) from error
    module.__dict__["__jinfercept_state__"] = state
    return module


def _failed_import(what: str, home: str, error: BaseException) -> ConfigError:
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else source_line(error, __file__)
    got = describe_failure(error) + line
    return ConfigError(f"the code of {_a(what)}, {home}, raises when it is imported", got=got, fix="correct it")


# -- shapes ---------------------------------------------------------------------------------------------------------------


def check_shape(what: str, value: object, protocol: type) -> None:
    """Raise `ConfigError` unless an object has a Protocol's attributes, and its methods with as many arguments."""
    if isinstance(value, type):
        raise ConfigError(f"{what} must be an object", got=f"the class {value.__name__}", fix=f"{value.__name__}(…)")
    fixes = list(_fixes(value, protocol))
    if fixes:
        raise ConfigError(
            f"{what} has the members of {protocol.__module__}.{protocol.__name__}",
            got=f"{type(value).__name__} {value!r:.80}",
            fix="; ".join(fixes),
        )


def has_members(value: object, protocol: type) -> bool:
    """Whether an object has a member for every method of a Protocol, whatever its arguments."""
    return all(hasattr(value, name) for name in methods_of(protocol))


def _fixes(value: object, protocol: type) -> Iterator[str]:
    missing = [name for name in get_type_hints(protocol) if not hasattr(value, name)]
    methods = methods_of(protocol)
    missing += [name + _arguments(method) for name, method in methods.items() if not hasattr(value, name)]
    if missing:
        yield f"add {', '.join(missing)}"
    for name, method in methods.items():
        if hasattr(value, name) and not _takes(value, name, method):
            yield f"{name} takes {_arguments(method)}"


def methods_of(protocol: type) -> dict[str, Callable[..., object]]:
    return {name: member for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


def _arguments(method: Callable[..., object]) -> str:
    return f"({', '.join(inspect.signature(method).parameters)})"


def _takes(value: object, name: str, method: Callable[..., object]) -> bool:
    own, (_, *arguments) = getattr(value, name, None), inspect.signature(method).parameters
    if not callable(own):
        return False
    try:
        inspect.signature(own).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method that is not written in Python has no signature
        pass
    return True


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
