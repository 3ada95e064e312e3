"""What tests are strict about and users are not: shapes in annotations are checked, no array is broadcast or cast silently.

jaxtyping's import hook wraps the functions of the rooms whose functions take arrays; beartype checks those hints that contain
shapes. All other types are pyright's work.
"""

import functools
import itertools
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, TypeAliasType, get_args

import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

ROOMS = ("cpu_kernels", "models", "pallas", "pallas.layouts", "runner")
"""Rooms whose functions take arrays."""
STEPPED = "jinfercept.runner."
"""Modules whose functions prepare every step on the host: checking each of them in all steps takes as long as the steps."""
ALWAYS, EVERY = 50, 7
"""How many calls of such a function are checked, and which ones after them; while JAX traces, all are."""
MOST_MADE = 10
"""How many of the functions that one nested definition makes are checked: each takes milliseconds to wrap."""


def check_shapes() -> None:
    """Check the shapes in annotations of functions of `ROOMS`, which nothing has imported yet."""
    usual, made = jaxtyping.jaxtyped, Counter[CodeType]()

    def where_shapes_are(typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        wrap = usual(typechecker=typechecker)

        def wrapped(decorated: Any) -> Any:
            if not _is_checked(decorated):
                return decorated
            made[decorated.__code__] += 1
            if made[decorated.__code__] > MOST_MADE:
                return decorated
            return _sampled(decorated, wrap(decorated)) if decorated.__module__.startswith(STEPPED) else wrap(decorated)

        return wrapped

    jaxtyping.jaxtyped = where_shapes_are  # what is wrapped takes several times as long, whether it is checked or not
    install_import_hook(_modules(), f"{__name__}.checked")


@contextmanager
def explicit() -> Iterator[None]:
    """Raise for arrays that are broadcast to more axes or cast to another type without being asked to, in engines too."""
    import jax

    from jinfercept.models import jax_settings

    strict: dict[Any, Any] = {jax.numpy_rank_promotion: "raise", jax.numpy_dtype_promotion: "strict"}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(jax_settings, "_OWN", tuple((each, strict.get(each, value)) for each, value in jax_settings._OWN))
        for setting, value in strict.items():
            stack.enter_context(setting(value))
        yield


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the arrays among its arguments and results checked at every call."""
    hints = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    checking = functools.cache(lambda: beartype(function))  # at the first call: it takes milliseconds
    return lambda *args, **kwargs: checking()(*args, **kwargs)


def _sampled(plain: Callable[..., Any], checking: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is checked in some of its calls."""
    from jax._src.core import trace_state_clean

    calls = itertools.count()

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        if trace_state_clean() and (number := next(calls)) >= ALWAYS and number % EVERY:
            return plain(*args, **kwargs)
        return checking(*args, **kwargs)

    return called


def _is_checked(decorated: Any) -> bool:
    """Whether something has shapes in its annotations. Not a dataclass: it is a tree of anything while JAX maps it."""
    return not isinstance(decorated, type) and any(map(_has_shape, decorated.__annotations__.values()))


def _modules() -> list[str]:
    """The modules of `ROOMS` that have shapes in their annotations."""
    modules = list[str]()
    for room in (f"jinfercept.{room}" for room in ROOMS):
        spec = find_spec(room)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for module in pkgutil.iter_modules(spec.submodule_search_locations, f"{room}."):
            file = Path(spec.submodule_search_locations[0]) / f"{module.name.rpartition('.')[2]}.py"
            modules += [module.name] if not module.ispkg and "jaxtyping" in file.read_text() else []
    return modules


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, TypeAliasType):
        return _has_shape(hint.__value__)
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))
