"""Errors: what is wrong, the value that was given, and how to fix it.

Every mistake is a `ValueError`, raised before memory is taken. A failing endpoint is not an error but a `Result`; a broken
invariant of ours is an `assert`. An exception in a step of the engine reaches callers as `EngineError`. Errors can be pickled
and copied with their messages, attributes and notes; an attribute that cannot be pickled becomes its text.
"""

import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

MOST_SHOWN = 120
"""Characters of a wrong value that an error shows."""


class JinferceptError(ValueError):
    """A mistake that the caller can mend.

    Args:
        what: the problem, without a full stop.
        got: the given value.
        fix: what to do instead.
    """

    def __init__(self, what: str, *, got: object, fix: str) -> None:
        self.what, self.got, self.fix = what, got, fix
        super().__init__(f"{what}; got {_text(got)}; fix: {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


class ConfigError(JinferceptError):
    """A flag, or a combination of flags, cannot work."""


def refuse_any(what: str, *cases: tuple[object, object, str]) -> None:
    """Raise `ConfigError` for the first case that applies: a condition, the given value, and the fix."""
    for applies, got, fix in cases:
        if applies:
            raise ConfigError(what, got=got, fix=fix)


class ModelError(JinferceptError):
    """A checkpoint, a model name or a tokenizer cannot be used."""


class RequestError(JinferceptError):
    """A request or its sampling parameters cannot be served."""


class GrammarError(RequestError):
    """A grammar that a request brings cannot be enforced to the end of its text."""


class PromptLengthError(RequestError):
    """A prompt is longer than the context that it is for."""


class ArgumentError(RequestError, TypeError):
    """A call has an argument that does not exist, or one by position that has to be named."""


class NoSuchNameError(RequestError, AttributeError):
    """An object lacks an attribute that users of other engines know."""


class EngineError(RuntimeError):
    """A step of the engine failed, or the engine was closed, and requests were lost with it.

    Args:
        failure: the exception of the step as text, such as `RuntimeError: the device is gone`.
        outputs: a `outputs.RequestOutput` for each prompt, in order; None for those that were not complete.
        fix: what to do next.
    """

    def __init__(self, failure: str, outputs: Sequence[Any] = (), *, fix: str) -> None:
        self.failure, self.outputs, self.fix = failure, list(outputs), fix
        lost = f"; {self.outputs.count(None)} of {len(self.outputs)} requests are lost" if self.outputs else ""
        super().__init__(f"the engine failed: {failure}{lost}; fix: {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


class PluginError(RuntimeError):
    """A user's own code in the engine, such as a policy, raised or gave an invalid answer.

    Args:
        plugin: its kind and name, such as `policy own.py:Mine`.
        problem: a verb phrase.
    """

    def __init__(self, plugin: str, problem: str) -> None:
        self.plugin, self.problem = plugin, problem
        super().__init__(f"the {plugin} {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def reduced(error: BaseException) -> tuple[Any, ...]:
    """`__reduce__` of an exception whose `__init__` does not take its message alone."""
    state = {name: picklable(value) for name, value in vars(error).items()}
    return _restored, (type(error), *map(picklable, error.args)), state


def _restored(kind: type[BaseException], *args: object) -> BaseException:
    return kind.__new__(kind, *args)


def picklable(value: Any) -> Any:
    """The value if it can be pickled, else its text, or a `RuntimeError` with an exception's; items of a list one by one."""
    if _is_picklable(value):
        return value
    if isinstance(value, list | tuple):
        items: list[Any] = [item if _is_picklable(item) else str(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return RuntimeError(describe_failure(value)) if isinstance(value, BaseException) else str(value)


def _is_picklable(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # a value's own methods may raise anything
        return False
    return True


def describe_failure(error: BaseException) -> str:
    """An exception as text. If its own methods raise, as much as can be read."""
    text = "an exception without a name"
    with suppress(BaseException):
        text = type(error).__name__
        text = f"{text}: {error}"
    return text


def is_users_interrupt(error: BaseException) -> bool:
    """Whether an exception is the user's Ctrl-C."""
    # users interrupt the main thread; in any other thread, code raised the `KeyboardInterrupt` itself
    return issubclass(type(error), KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def shown(value: object) -> str:
    """The beginning of a value's `repr`; of a value that cannot be shown, its type's name."""
    try:
        text = repr(value)
    except Exception:  # a value's own methods may raise anything
        return f"a {type(value).__name__} whose repr fails"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return shown(value)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint at the known name that is nearest to a wrong one, as ` (did you mean 'x'?)`; "" if none is near."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
