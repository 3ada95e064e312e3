"""Checks the fields of a profile, as a file or a caller gives them. Prices nothing."""

import reprlib
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, get_args

from jinfercept.errors import ConfigError, shown

MOST_SATURATION = 1_000_000

Source = Literal["paper", "roofline", "measured"]


def check_field(name: str, kind: object, value: Any) -> None:
    """Raise `ConfigError` if a profile's field cannot have this value."""
    if kind is float or kind is int:
        least = 1 if kind is int else 0
        types = int if kind is int else int | float
        if not isinstance(value, types) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            what = "whole number" if kind is int else "finite number"
            raise ConfigError(f"a profile's {name} is not a {what}", got=reprlib.repr(value), fix="give one")
        if value < least and name != "fixed_s":
            raise ConfigError(f"a profile's {name} is too small", got=value, fix=f"at least {least}")
        if name == "saturation" and value > MOST_SATURATION:
            raise ConfigError(f"a profile's {name} is too large", got=value, fix=f"at most {MOST_SATURATION:,}")
    elif kind is str and (not isinstance(value, str) or not value):
        raise ConfigError("a profile needs a name", got=shown(value), fix="name the model and the machine")
    elif kind is Source and value not in get_args(Source):
        raise ConfigError(
            "a profile's source is unknown", got=shown(value), fix=f"one of {', '.join(get_args(Source))}"
        )
    elif name == "tables" and not isinstance(value, Mapping):
        raise ConfigError("a profile's table is not a mapping", got=type(value).__name__, fix="give a mapping")
    elif name.startswith("bucket_") and not _ascends(value):
        raise ConfigError(f"a profile's {name} do not ascend from above 0", got=reprlib.repr(value), fix="sort them")


def _ascends(values: Any) -> bool:
    """Whether these are positive numbers, none smaller than the one before."""
    numbers = isinstance(values, tuple) and all(
        isinstance(v, int | float) and 0 < v <= sys.float_info.max for v in values
    )
    return numbers and all(earlier <= later for earlier, later in pairwise(values))
