"""Checks a user's object against a Protocol, before a step uses it."""

from collections.abc import Callable, Iterator
from inspect import isfunction, signature
from typing import Any, get_type_hints

from jinfercept.errors import ConfigError


def check_shape(what: str, value: object, protocol: type) -> None:
    """Raise `ConfigError` unless an object has a Protocol's attributes, and its methods with as many arguments.

    Args:
        what: noun for the error, such as "a policy".
    """
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


def missing_members(abstract: Callable[..., Any], protocol: type) -> list[str]:
    """The methods that an abstract class still lacks, with their arguments."""
    lacking: frozenset[str] = getattr(abstract, "__abstractmethods__", frozenset())
    return [name + _arguments(method) for name, method in methods_of(protocol).items() if name in lacking]


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
    return {name: member for name, member in vars(protocol).items() if isfunction(member) and name[0] != "_"}


def _arguments(method: Callable[..., object]) -> str:
    return f"({', '.join(signature(method).parameters)})"


def _takes(value: object, name: str, method: Callable[..., object]) -> bool:
    """Whether the object's method can be called with the arguments of the Protocol's."""
    own, (_, *arguments) = getattr(value, name, None), signature(method).parameters
    if not callable(own):
        return False
    try:
        signature(own).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method that is not written in Python has no signature
        pass
    return True
