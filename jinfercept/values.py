"""Values that callers pass: options as fields, plain numbers, JSON that stays JSON, and short `repr`s of long texts."""

import json
import math
from array import array
from dataclasses import MISSING, field, fields
from reprlib import Repr
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

from jinfercept.errors import ConfigError, shown

_PLAIN = frozenset({int, float, str, bool, type(None)})


def plain(value: Any) -> Any:
    """Scalars and arrays of NumPy, JAX and torch as Python's numbers and lists, in lists and tuples too; others as they are."""
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)):
        return value.tolist()
    if type(value) in (list, tuple):
        return value if _PLAIN.issuperset(map(type, value)) else type(value)(map(plain, value))
    return value


def strict_json(text: str) -> Any:
    """The value of a JSON text, which can be written as JSON again.

    Raises:
        ValueError: the text is not JSON, or has a number that JSON cannot write: NaN or infinity, also as `1e400`.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def json_object(text: str) -> dict[str, Any]:
    """The object that a JSON text is; {} if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(digits: str) -> NoReturn:
    raise ValueError(f"{digits[:40]} is no finite number")


_TEXT = Repr(maxstring=64, maxother=200)
_LISTED = frozenset({"outputs", "calls", "results"})
"""Fields whose items are shown; other sequences are counted."""
_MOST = 3
"""Items that are shown."""
_NUMBERS = 4
"""Numbers of a sequence that is shown whole."""


def short_repr(self: Any) -> str:
    """`Name(field=value, …)`: long texts without their middle, sequences as `<number of items>`, defaults left out."""
    shown = [
        f"{field.name}={_value(field.name, value)}"
        for field in fields(self)
        if field.repr and ((value := getattr(self, field.name)) != field.default or field.default is MISSING)
    ]
    return f"{type(self).__name__}({', '.join(shown)})"


def _value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return _TEXT.repr(value)
    if isinstance(value, array):
        value = value.tolist()
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return repr(value)
    if name in _LISTED:
        return f"[{', '.join([*map(repr, value[:_MOST]), *([f'… {len(value) - _MOST} more'] * (len(value) > _MOST))])}]"
    numbers = all(isinstance(item, int | float) for item in value[:_NUMBERS])
    return repr(value) if numbers and len(value) <= _NUMBERS else f"<{len(value)}>"


def option(default: Any, text: str, *aliases: str, least: float | None = None, most: float | None = None) -> Any:
    """A field with its default, its help text, other flags that mean the same, and its least and greatest value."""
    return field(default=default, metadata={"help": text, "aliases": aliases, "least": least, "most": most})


def check_bounds(options: Any) -> None:
    """Raise `ConfigError` for a field outside its bounds, and for one that is infinite."""
    for at in fields(options):
        value, least, most = getattr(options, at.name), at.metadata["least"], at.metadata["most"]
        if least is not None and value is not None and not value >= least:
            raise ConfigError(f"{at.name} is too small", got=value, fix=f"at least {least}")
        if least is not None and value == math.inf:
            raise ConfigError(f"{at.name} is not finite", got=value, fix="give a number")
        if most is not None and value is not None and value > most:
            raise ConfigError(f"{at.name} is too large", got=value, fix=f"at most {most}")


def without_none(hint: Any) -> Any:
    """`int` of `int | None`; any other type as it is."""
    arguments = get_args(hint)
    return arguments[0] if NoneType in arguments else hint


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` if a value has another type than its annotation: a class, a `Literal`, or one of these or None."""
    if (value is None and NoneType in get_args(hint)) or (isinstance(value, dict) and dict[str, Any] in get_args(hint)):
        return
    bare_hint = without_none(hint)
    if get_origin(bare_hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is a list of texts", got=shown(value), fix="give several, or one in a list")
        return
    choices = get_args(bare_hint)
    kind = type(choices[0]) if choices else bare_hint
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name} has the wrong type", got=shown(value), fix=f"give a value of type {kind.__name__}")
    if choices and value not in choices:
        raise ConfigError(
            f"{name} is one of {', '.join(map(str, choices))}", got=shown(value), fix="choose one of them"
        )
