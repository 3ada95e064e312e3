"""JSON objects that are not changed any more, each with what was computed of it: it is computed once."""

from collections.abc import Callable, Hashable
from typing import Any, final


@final
class KnownObject(dict[str, Any]):
    """A JSON object that lasts; a changed copy of it is a plain dict.

    Attributes:
        derived: what was computed of it, by names.
    """

    __slots__ = ("derived",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.derived = dict[Hashable, Any]()


def derived[S, T](value: S, name: Hashable, compute: Callable[[S], T]) -> T:
    """What a function computes of a value, computed once of a `KnownObject`.

    Args:
        name: of the result among those of all functions.
    """
    if type(value) is not KnownObject:
        return compute(value)
    results = value.derived
    if name not in results:
        results[name] = compute(value)
    return results[name]
