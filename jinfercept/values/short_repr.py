"""Short `repr`s of dataclasses that hold whole texts and token ids."""

from array import array
from dataclasses import MISSING, fields
from reprlib import Repr
from typing import Any

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
