"""Options as fields of dataclasses: their help, their types, and whether a value has its type."""

import math
from dataclasses import field, fields
from types import NoneType
from typing import Any, get_args, get_origin

from jinfercept.errors import ConfigError, shown


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
