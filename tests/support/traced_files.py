"""Executables are traced once for all processes of tests: a file names the entry of JAX's cache that was compiled of the same.

An entry of JAX's cache is found by the program, for which a function has to be traced and lowered: three quarters of what an
executable takes that is found there. A file here is found by what it was traced of, as `compiled_once` has it, and by the text
of all files of the rooms through which tracing runs. Where one of them differs, or where a value has no name that other
processes would give it too, functions are traced as ever.
"""

import hashlib
import io
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import compilation_cache
from jax._src.core import AxisEnv
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from jinfercept.cpu_kernels import native

PROJECT = Path(__file__).parents[2]
VERSIONS_KEPT = 12
"""Folders of files that are kept, each of one version of the sources and of the variables of the environment."""
ELSEWHERE = ("builtins", "collections", "functools", "numpy", "jax", "jaxlib", "ml_dtypes", "types", "enum")
"""Packages of types and functions that the versions of Python and JAX fix."""
BESIDE = re.compile(r"jinfercept\.\w+")
"""Modules that lie beside all rooms."""
TARGET = re.compile(r"jinfercept_\w+")


class Unnamed(Exception):
    """Something has no name that another process would give it too."""


class GoneError(Exception):
    """JAX's cache has an entry no longer."""


class TracedFiles:
    """The files of this version of the sources.

    Args:
        rooms: packages through which tracing runs.
    """

    def __init__(self, patch: pytest.MonkeyPatch, rooms: Iterable[str]) -> None:
        self._rooms = (*rooms, "tests.support")  # with models that are scripted
        self._folder, self._entries = _folder(list(self._files())), threading.local()
        self._usual_get = compilation_cache.get_executable_and_time
        patch.setattr(compilation_cache, "get_executable_and_time", self._get)

    def key(self, made_of: Hashable) -> str | None:
        """The name of the file for what is made of this; None if it has no name."""
        try:
            text = f"{self._text(made_of)} {jax.device_count()} {jax.process_count()} {jax.default_backend()}"
        except Unnamed:
            return None
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, key: str) -> jax.stages.Compiled | None:
        """The executable; None if there is no file, or what it names is gone or cannot be loaded."""
        try:
            with (self._folder / key).open("rb") as file:
                if not native._COMPILED.keys() >= pickle.load(file):
                    return None  # tracing registers what it calls
                executable, arguments, no_kwargs, in_tree, out_tree = _Unpickler(file, jax.devices()[0].client).load()
        except (OSError, EOFError, pickle.UnpicklingError, GoneError, jax.errors.JaxRuntimeError):
            return None
        return jax.stages.Compiled(executable.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)

    def compile(self, key: str, lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
        """Compile, or find in JAX's cache, and write the file."""
        self._entries.last = None
        compiled: Any = lowered.compile(options)
        unloaded = getattr(compiled._executable, "_unloaded_executable", None)
        entry = self._entries.last
        if entry is None or unloaded is None:
            return compiled
        if compiled._params.const_args or unloaded.host_callbacks or unloaded.keepalive:
            return compiled
        arguments, in_tree = jax.tree.flatten(compiled.args_info)
        targets = set(TARGET.findall(lowered.as_text()))
        content = io.BytesIO(pickle.dumps(targets))
        content.seek(0, os.SEEK_END)
        try:
            _Pickler(content, entry).dump((unloaded, arguments, compiled._no_kwargs, in_tree, compiled.out_tree))
        except (TypeError, ValueError, AttributeError, pickle.PicklingError):
            return compiled
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(content.getvalue())
        os.replace(file.name, self._folder / key)
        return compiled

    def _get(self, cache_key: str, options: Any, backend: Any, devices: Any, *rest: Any) -> Any:
        """As JAX's own, but notes what was looked for."""
        self._entries.last = cache_key, tuple(device.id for device in devices)
        return self._usual_get(cache_key, options, backend, devices, *rest)

    def _files(self) -> Iterator[Path]:
        """The modules of the rooms, and those that lie beside all rooms. Tests' own decide what is checked while JAX traces."""
        yield from (PROJECT / "jinfercept").glob("*.py")
        for room in self._rooms:
            yield from PROJECT.joinpath(*room.split(".")).rglob("*.py")

    def _named(self, module: str) -> bool:
        """Whether versions and sources fix what is defined in a module."""
        if module.split(".")[0] in ELSEWHERE:
            return True
        return module.startswith(tuple(f"{room}." for room in self._rooms)) or bool(BESIDE.fullmatch(module))

    def _text(self, value: Any) -> str:
        if isinstance(value, Enum):
            return f"{self._text(type(value))}.{value.name}"
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype)):
            return repr(value)
        if isinstance(value, (tuple, list)):
            self._check(type(value))
            return f"{type(value).__qualname__}({', '.join(map(self._text, value))})"
        if isinstance(value, type):
            self._check(value)
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            if self._named(value.__module__) and _found(value) is value:
                return f"{value.__module__}.{value.__qualname__}"
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                raise Unnamed(value)
            return self._code(value.__code__)
        if isinstance(value, jax.ShapeDtypeStruct):
            weak, place = getattr(value, "weak_type", False), value.sharding
            return f"{value.shape} {value.dtype} {weak} {self._text(place)}"
        if isinstance(value, jax.sharding.NamedSharding):
            return f"named {self._text(value.mesh)} {value.spec!r} {value.memory_kind}"
        if isinstance(value, jax.sharding.SingleDeviceSharding):
            return f"single {[device.id for device in value.device_set]} {value.memory_kind}"
        if isinstance(value, jax.sharding.Mesh):
            ids = [device.id for device in value.devices.flat]
            return f"mesh {ids} {value.devices.shape} {value.axis_names} {value.axis_types}"
        if isinstance(value, jax.sharding.AbstractMesh | jax.sharding.PartitionSpec):
            return repr(value)
        if isinstance(value, jax.tree_util.PyTreeDef):
            return self._plain(str(value))
        if isinstance(value, AxisEnv):
            return self._plain(f"{value.axis_sizes} {value.spmd_axis_names} {value.explicit_mesh_axis_names}")
        if type(value).__module__.split(".")[0] in ("jax", "jaxlib") and not isinstance(value, jax.Array):
            return self._plain(repr(value))
        raise Unnamed(value)

    def _code(self, code: CodeType) -> str:
        path = Path(code.co_filename)
        if not path.is_relative_to(PROJECT):
            raise Unnamed(code)
        name = path.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".")
        if not self._named(name):
            raise Unnamed(code)
        constants = [self._code(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
        return self._plain(
            f"{name} {code.co_qualname} {code.co_firstlineno} {code.co_code.hex()} {code.co_names} {constants}"
        )

    def _check(self, kind: type) -> None:
        if not self._named(kind.__module__):
            raise Unnamed(kind)

    def _plain(self, text: str) -> str:
        """The text, if no address is in it."""
        if " at 0x" in text:
            raise Unnamed(text)
        return text


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Names the entry of JAX's cache instead of an executable."""

    def __init__(self, file: Any, entry: tuple[str, tuple[int, ...]]) -> None:
        super().__init__(file)
        self._entry = entry

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, xla_client.LoadedExecutable):
            return "entry", *self._entry
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Reads the entry of JAX's cache."""

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "entry":
            return super().persistent_load(pid)
        devices = xla_client.DeviceList(tuple(self.devices_by_id[id] for id in pid[2]))
        executable, _ = compilation_cache.get_executable_and_time(pid[1], None, self.backend, devices)
        if executable is None:
            raise GoneError(pid[1])
        return executable


def _found(function: FunctionType) -> Any:
    """What has the function's name in its module."""
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def _folder(files: Iterable[Path]) -> Path:
    """The folder of the files of these sources; of others those that were used last are left."""
    digest = hashlib.sha256(f"{sys.version} {jax.__version__} {version('jaxlib')} {sorted(native.features())}".encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith(("JAX_", "XLA_", "JINFERCEPT_", "NPROC")) and "CACHE" not in name:
            digest.update(f"\0{name}={value}".encode())
    for path in sorted(files):
        digest.update(f"\0{path.relative_to(PROJECT)}\0".encode() + path.read_bytes())
    above = Path(f"{os.environ['JAX_COMPILATION_CACHE_DIR']}-traced")
    folder = above / digest.hexdigest()[:16]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for old in sorted(above.iterdir(), key=lambda path: path.stat().st_mtime)[:-VERSIONS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return folder
