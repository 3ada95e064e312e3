"""Checks a user's object against a Protocol, before a step uses it."""

from collections.abc import Callable
from inspect import isfunction, signature
from typing import get_type_hints

from jinfercept.errors import ConfigError


def check_shape(what: str, value: object, protocol: type) -> None:
    """Raise `ConfigError` unless an object has a Protocol's attributes, and its methods with as many arguments.

    Args:
        what: noun for the error, such as "a policy".
    """
    if isinstance(value, type):
        raise ConfigError(f"{what} is an object", got=f"the class {value.__name__}", fix=f"{value.__name__}(…)")
    methods = {name: member for name, member in vars(protocol).items() if isfunction(member) and name[0] != "_"}
    wrong = [name for name in get_type_hints(protocol) if not hasattr(value, name)]
    wrong += [f"{name}{signature(method)}" for name, method in methods.items() if not _takes(value, name, method)]
    if wrong:
        raise ConfigError(
            f"{what} has the members of {protocol.__module__}.{protocol.__name__}",
            got=f"{type(value).__name__} {value!r:.80}",
            fix=f"add {', '.join(wrong)}",
        )


def _takes(value: object, name: str, method: Callable[..., object]) -> bool:
    """Whether the object's method can be called with the arguments of the Protocol's."""
    found, (_, *arguments) = getattr(value, name, None), signature(method).parameters
    if not callable(found):
        return False
    try:
        signature(found).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method that is not written in Python may have no signature
        return True
    return True
