"""Kernels of a CPU beside XLA's own code: compiled for this machine by llvmlite, called through XLA's foreign functions.

They need the optional package llvmlite (`jinfercept[cpu]`) and Linux on an x86 CPU with AVX2. A kernel is compiled, or read
from the disk, when the first function that calls it is traced, and stays until the process ends. Its machine code is kept on
disk, beside the executables that JAX keeps there, since compiling it takes LLVM seconds.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jinfercept.cpu_kernels.machine import num_processors

if TYPE_CHECKING:
    from jinfercept.cpu_kernels.code import Kernel

log = logging.getLogger(__name__)
_LOCK = threading.Lock()
_COMPILED: dict[str, Any] = {}  # engines of LLVM by target, which own the machine code that XLA calls


@cache
def features() -> frozenset[str]:
    """LLVM's names of this CPU's features; empty if kernels cannot be compiled for it."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return frozenset()
    try:
        import llvmlite.binding as llvm
    except ImportError:
        log.info("kernels for this CPU are off, XLA computes everything; fix: pip install jinfercept[cpu]")
        return frozenset()
    names = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    return names if {"avx2", "fma"} <= names else frozenset()


def usable() -> bool:
    """Whether code for JAX's default backend can call kernels."""
    return jax.default_backend() == "cpu" and bool(features())


def lanes() -> int:
    """Numbers of float32 in the widest vector of this CPU."""
    return 16 if "avx512f" in features() else 8


def target(kernel: "Kernel") -> str:
    """The name of the FFI target that runs the kernel; compiled and registered at the first call."""
    from jinfercept.cpu_kernels.threads import POOL, handler

    name = f"jinfercept{re.sub(r'[^a-zA-Z0-9-]+', '_', repr(kernel))}"
    with _LOCK:
        if name not in _COMPILED:
            engine = _COMPILED[name] = _compile(name, lambda: handler(name, kernel))
            ctypes.c_void_p.from_address(engine.get_global_value_address(POOL)).value = _pool()
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address(name))
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu", api_version=1)
    return name


def call(kernel: "Kernel", result: jax.ShapeDtypeStruct, *operands: jax.Array, into: int | None = None) -> jax.Array:
    """The kernel's result, row-major as its operands are; under `jax.vmap` one call after the other. Where the kernel writes
    nothing, the result has the operand with number `into`."""
    aliases = None if into is None else {into: 0}
    compute = jax.ffi.ffi_call(target(kernel), result, vmap_method="sequential", input_output_aliases=aliases)
    return compute(*operands)  # pyright: ignore[reportReturnType]


@cache
def _pool() -> int:
    from jinfercept.cpu_kernels.threads import SERVE, serving, start

    engine = _COMPILED[SERVE] = _compile(SERVE, serving)
    return start(num_threads(), engine.get_function_address(SERVE))


def _compile(name: str, module: Callable[[], Any]) -> Any:
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, flags = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=flags, opt=3, jit=True)
    versions = (llvmlite.__version__, str(llvm.llvm_version_info), machine.triple)
    depends_on = (*versions, cpu, flags, *sorted(features()), str(num_threads()))
    code = cached(name, depends_on, lambda: _emit(module(), machine))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _emit(module: Any, machine: Any) -> bytes:
    import llvmlite.binding as llvm

    optimised = llvm.parse_assembly(str(module))
    optimised.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(optimised, builder)
    return machine.emit_object(optimised)


@cache
def num_threads() -> int:
    """The threads that compute a kernel: the cores that this process may use."""
    return num_processors()


_DIGEST_BYTES = 32


def cached(name: str, depends_on: Iterable[str], emit: Callable[[], bytes]) -> bytes:
    """The kernel's object file, from the disk, or emitted and written there. A damaged entry is replaced.

    Without a compilation cache of JAX in a local directory that can be written, it is emitted every time. Several processes may
    ask at once. `depends_on` tells one object file of the kernel from another, beside the source code of the kernels.
    """
    folder = _folder()
    if folder is None:
        return emit()
    digest = hashlib.sha256("\n".join((_sources(), name, *depends_on)).encode()).hexdigest()
    path = folder / f"{name}-{digest[:32]}"
    code = _read(path)
    if code is None:
        code = emit()
        _write(path, code)
    return code


def _folder() -> Path | None:
    directory = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    return None if not directory or "://" in directory else Path(directory) / "kernels"


@cache
def _sources() -> str:
    package = Path(__file__).parents[1]
    files = sorted(file for room in ("cpu_kernels", "pallas/layouts") for file in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    log.warning("the cached kernel %s is damaged, it is compiled again", path)
    return None


def _write(path: Path, code: bytes) -> None:
    # a directory that cannot be written is no error
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(path)  # at once, so that no process reads a part of it
        except OSError:
            Path(name).unlink(missing_ok=True)
