"""Executables are traced and compiled once per process: tests start hundreds of engines, most of them of the same shapes.

What is compiled is found again by all that tracing reads: the function and what it is bound to, its arguments' shapes, the
settings of JAX, and whatever a test has replaced in a module of the rooms that are traced. An executable that is found counts
as a compilation, and as a hit of the cache on disk.
"""

import dataclasses
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.config import trace_context

from jinfercept.runner.executables import Executables

MOST = 400
"""Executables that are kept, the latest used."""
TRACED = tuple(f"jinfercept.{room}" for room in ("cpu_kernels", "layouts", "models", "pallas", "runner"))
"""Rooms whose modules tracing runs through."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, type, np.dtype, jax.ShapeDtypeStruct)
_PLAIN += (jax.tree_util.PyTreeDef,)
_PLACES = (jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec)
_Name = tuple[str, str, str]
"""Of a module, of it again or of one of its classes, and of a member."""


class _Unknown(Exception):
    """Something is no value: what is made of it is compiled anew."""


class CompiledOnce:
    """Replaces how `Executables` compile, until the end of the patch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made = OrderedDict[Hashable, tuple[jax.stages.Compiled, Any]]()
        self._lock, self._usual, add = threading.Lock(), dict[_Name, Any](), Executables.add
        self._changes: dict[_Name, Any] | None = None

        def adds(run: Executables, key: Hashable, function: Any, *arguments: Any, donate: Any = ()) -> None:
            add(run, key, function, *arguments, donate=donate)
            pending: dict[Hashable, Any] = run._pending
            whole, shapes = run.whole(key), jax.tree.map(_shape, arguments)
            pending[whole] = functools.partial(_Lowered, self, pending[whole], function, shapes, donate)

        patch.setattr(Executables, "add", adds)
        self._replaced()
        for method in ("setattr", "delattr", "undo"):
            patch.setattr(pytest.MonkeyPatch, method, self._noting(getattr(pytest.MonkeyPatch, method)))

    def compiled(self, made_of: Hashable, kept: Any, compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """The executable, compiled now if there is none.

        Args:
            made_of: all that it is made of.
            kept: objects whose identity stands in `made_of`.
        """
        changes = self._replaced()
        key = (made_of, trace_context(), tuple((name, id(value)) for name, value in changes.items()))
        with self._lock:
            if (made := self._made.get(key)) is not None:
                self._made.move_to_end(key)
        if made is not None:
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 0.0)
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            return made[0]
        compiled = compile()
        with self._lock:
            self._made[key] = compiled, (kept, changes)
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        return compiled

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of patches, after which modules are looked through again."""

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self._changes = None

        return called

    def _replaced(self) -> dict[_Name, Any]:
        """What differs in the traced modules from what was there first."""
        changes = self._changes
        if changes is None:
            contents = _contents()
            changes = {name: value for name, value in contents if self._usual.setdefault(name, value) is not value}
            self._changes = changes
        return changes


class _Lowered:
    """Compiles as `jax.stages.Lowered` does, but is lowered only if there is no executable yet."""

    def __init__(self, once: CompiledOnce, lower: Callable[[], jax.stages.Lowered], *made_of: Any) -> None:
        self._once, self._lower, self._made_of = once, lower, made_of

    def compile(self, compiler_options: Mapping[str, Any]) -> jax.stages.Compiled:
        function, shapes, donate = self._made_of
        leaves, tree = jax.tree.flatten(shapes)
        try:
            made_of = _value(function), _value(leaves), tree, tuple(donate), _value(compiler_options)
        except _Unknown:
            return self._lower().compile(dict(compiler_options))
        return self._once.compiled(made_of, function, lambda: self._lower().compile(dict(compiler_options)))


def _contents() -> list[tuple[_Name, Any]]:
    """What the modules of `TRACED`, and their classes, consist of."""
    contents = []
    for name, module in list(sys.modules.items()):
        if name.startswith(TRACED):
            contents += _members(module, name)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    contents += _members(kind, name)
    return contents


def _members(owner: ModuleType | type, module: str) -> list[tuple[_Name, Any]]:
    return [((module, owner.__name__, name), value) for name, value in vars(owner).items() if name[:2] != "__"]


def _value(value: Any) -> Hashable:
    """The same for what is traced alike. Raises `_Unknown` for arrays and the like."""
    if isinstance(value, (*_PLAIN, *_PLACES)):
        return type(value), value
    if isinstance(value, functools.partial):
        return functools.partial, _value(value.func), _value(value.args), _value(value.keywords)
    if isinstance(value, MethodType):
        return MethodType, value.__func__, _value(value.__self__)
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        try:
            defaults = value.__defaults__, value.__kwdefaults__ or {}
            return value.__code__, _value([cell.cell_contents for cell in cells]), _value(defaults)
        except _Unknown:
            return value
    if isinstance(value, (list, tuple)):
        return type(value), *(_value(part) for part in value)
    if isinstance(value, Mapping):
        return type(value), *((key, _value(part)) for key, part in value.items())
    if dataclasses.is_dataclass(value):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return type(value), *(_value(getattr(value, name)) for name in compared)
    if type(value).__module__.startswith(("jinfercept.", "tests.")) and hasattr(value, "__dict__"):
        return type(value), *((name, _value(part)) for name, part in vars(value).items())
    raise _Unknown(value)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
