"""Numbers of other libraries as Python's own."""

from typing import Any

_PLAIN = (int, float, str, bool, type(None))


def plain(value: Any) -> Any:
    """Scalars and arrays of NumPy, JAX and torch as Python's numbers and lists, in lists and tuples too; others as they are."""
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)):
        return value.tolist()
    if type(value) in (list, tuple):
        return value if all(type(item) in _PLAIN for item in value) else type(value)(map(plain, value))
    return value
