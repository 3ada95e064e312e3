"""Values that callers pass: plain numbers, JSON that stays JSON, and short `repr`s of long texts."""

import json
import math
from array import array
from dataclasses import MISSING, fields
from reprlib import Repr
from typing import Any, NoReturn

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
    """The object of a JSON text; {} if the text is none, or nested so deeply that a body of JSON could not have it.

    It can be written as JSON again: a number that JSON cannot write, such as `1e400` or `NaN`, becomes its text.
    """
    try:
        value = json.loads(text, parse_constant=str, parse_float=_number)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and _is_flat(value, _MOST_LEVELS) else {}


_MOST_LEVELS = 200


def _is_flat(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_flat(item, levels - 1) for item in inner)


def _number(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits


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
