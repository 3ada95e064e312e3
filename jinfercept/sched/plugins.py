"""A user's own code in the engine: a policy, an estimator or a workload, given as a place, a class, a function or an object.

A *place* is `path.py:Name` or `package.module:Name`. Places come from the operator alone, as flags, keyword arguments or TOML
tables: no field of a request is ever loaded. The noun `what`, such as "policy", names the object in errors.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from jinfercept.errors import ConfigError, describe_failure, nearest


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def is_place(text: str) -> bool:
    """Whether a text is a place. Built-in names have no colon."""
    return ":" in text


def label(choice: object) -> str:
    """The name of a choice in reports and errors: a given name or place, else the name of the class or function."""
    if isinstance(choice, str):
        return choice
    named = choice if isinstance(choice, type) or inspect.isfunction(choice) else type(choice)
    return named.__name__


def check_name(what: str, name: str, names: Mapping[str, object]) -> None:
    if name not in names:
        fix = f"one of {', '.join(names)}; or your own, as path.py:Class or package.module:Class"
        raise ConfigError(f"no such {what}", got=name + nearest(name, list(names)), fix=fix)


def load_plugin(what: str, place: str) -> object:
    """The object at a place. A file runs at its first use, and again once it has changed.

    Raises `ConfigError` if there is no such file, module or name, or if it raises when it is imported.
    """
    home, _, name = place.rpartition(":")
    if not home or not name.isidentifier():
        fix = "path.py:Class or package.module:Class"
        raise ConfigError(f"{_a(what)} of your own must be named as FILE.py:CLASS or MODULE:CLASS", got=place, fix=fix)
    in_file = home.endswith(".py") or "/" in home
    module = _run_file(what, Path(home)) if in_file else _import(what, home)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [member for member in vars(module) if not member.startswith("_")]
        own = [member for member in public if getattr(vars(module)[member], "__module__", None) == module.__name__]
        got = f"{place}{nearest(name, public)}"
        raise ConfigError(f"no such {what}: {home} has no {name}", got=got, fix=f"one of {', '.join(own)}") from None


def build_plugin[T](what: str, choice: object, protocol: type[T], *inputs: object) -> T:
    """The object that a choice means: a place, a class, a function that makes an object, or the object itself.

    A class or a function is called with the inputs if it requires arguments, and without any if it requires none. Raises
    `ConfigError` as `load_plugin`, if calling it raises, if it takes other arguments, or if the object lacks a member of the
    Protocol.
    """
    name = label(choice)
    if isinstance(choice, str):
        choice = load_plugin(what, choice)
    if isinstance(choice, type) or (callable(choice) and not has_members(choice, protocol)):
        choice = _call(what, name, choice, inputs)
    check_shape(_a(what), choice, protocol)
    return choice  # pyright: ignore[reportReturnType] # it has the members


def source_line(error: BaseException, skipped: str) -> str:
    """The innermost line of an exception outside the file `skipped`, as ` (own.py, line 12)`; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != skipped]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _call(what: str, name: str, factory: Callable[..., Any], inputs: tuple[object, ...]) -> object:
    required = _required(factory)
    if len(required) not in (0, len(inputs)) or not all(map(_may_be, required, inputs)):
        takes = f"nothing or {', '.join(type(value).__name__ for value in inputs)}" if inputs else "nothing"
        got = f"{name}({', '.join(map(str, required))})"
        raise ConfigError(f"{_a(what)} is made with {takes}", got=got, fix="give its other arguments defaults")
    try:
        return factory(*inputs) if required else factory()
    except ConfigError:
        raise
    except Exception as error:  # it is the user's
        got = describe_failure(error) + source_line(error, __file__)
        raise ConfigError(
            f"the {what} {name} raised when it was made", got=got, fix="correct its constructor"
        ) from error


def _required(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # there is no signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds]


def _may_be(parameter: inspect.Parameter, value: object) -> bool:
    # only annotations that are classes are read
    hint = parameter.annotation
    return hint is parameter.empty or not isinstance(hint, type) or isinstance(value, hint)


def _import(what: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{home}.".startswith(f"{error.name}."):
            fix = "install it or set PYTHONPATH, or give its file: path.py:Class"
            raise ConfigError(f"no such module for {_a(what)}", got=home, fix=fix) from None
        raise _failed_import(what, home, error) from error


def _run_file(what: str, path: Path) -> ModuleType:
    try:
        stat, path = path.stat(), path.resolve()
    except OSError:
        raise ConfigError(f"no such file for {_a(what)}", got=path, fix="give the path of one that is there") from None
    name = f"jinfercept_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    state = (stat.st_mtime_ns, stat.st_size)
    ran = sys.modules.get(name)
    if ran is not None and getattr(ran, "__jinfercept_state__", None) == state:
        return ran
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"the file of {_a(what)} must be a Python file", got=path, fix="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed_import(what, str(path), error) from error
    module.__dict__["__jinfercept_state__"] = state
    return module


def _failed_import(what: str, home: str, error: BaseException) -> ConfigError:
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else source_line(error, __file__)
    got = describe_failure(error) + line
    return ConfigError(f"the code of {_a(what)}, {home}, raises when it is imported", got=got, fix="correct it")


# -- shapes ---------------------------------------------------------------------------------------------------------------


def check_shape(what: str, value: object, protocol: type) -> None:
    """Raise `ConfigError` unless an object has a Protocol's attributes, and its methods with as many arguments."""
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
    return {name: member for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


def _arguments(method: Callable[..., object]) -> str:
    return f"({', '.join(inspect.signature(method).parameters)})"


def _takes(value: object, name: str, method: Callable[..., object]) -> bool:
    own, (_, *arguments) = getattr(value, name, None), inspect.signature(method).parameters
    if not callable(own):
        return False
    try:
        inspect.signature(own).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method that is not written in Python has no signature
        pass
    return True
