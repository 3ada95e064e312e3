"""Numbers of other libraries as Python's own, and values of JSON texts that stay JSON."""

import json
import math
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


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(digits: str) -> NoReturn:
    raise ValueError(f"{digits[:40]} is no finite number")
