"""Handlers of the CPU kernels, which XLA calls: the items are computed by the caller and by helpers, threads for all kernels.

XLA has a pool of as many threads as the process has cores, and the caller is one more: with kernels in that pool, two threads
would often share a core while another waits for what they do. So there is one helper less than cores. A helper looks for the
next call for a moment, as the kernels of a step follow each other closely, and then sleeps. A call that comes while another has
the helpers is computed by its caller alone. A caller waits for items that a helper has begun, never for a free helper.

Each thread takes the items of a run of neighbours, so that it reads memory in sequence, and then what is left of other runs.
The pool is a piece of memory: a line of the cache for each number that several threads change.
"""

import ctypes
import logging
import os
import signal
from typing import Any

from llvmlite import ir

from jinfercept.cpu_kernels.code import I8, I32, I64, POINTER, Code, Kernel

log = logging.getLogger(__name__)

POOL = "pool"
"""Name of the variable in which a kernel's module has the address of the pool; 0: the caller is alone."""
SERVE = "serve"
"""Name of the function that a helper runs."""
AWAKE_CYCLES = 300_000
"""Cycles of the time stamp counter, about 0.1 ms, for which a helper looks for the next call before it sleeps."""
_METADATA = 1  # type of the frame's extension by which XLA asks for the version
_VERSION = (0, 1)  # of the interface: the offsets hold since then
_EXTENSION = 8  # in a call frame
_LINE = 64
_BUSY, _CALLS, _OPEN, _INSIDE, _ASLEEP, _TAKEN = (_LINE * line for line in range(6))
_MOST, _TOTAL, _RUNS, _FRAME, _WORK = (6 * _LINE + 8 * place for place in range(5))
_NEXT = 7 * _LINE  # each run's next item
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 128, 129, (1 << 31) - 1  # Linux' system call, within a process


def handler(kernel: Kernel) -> ir.Module:
    """A module with the kernel's FFI handler, of the kernel's name."""
    module = ir.Module(kernel.name)
    item = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64]), "item"))
    kernel.item(item, item.function.args[1])
    item.builder.ret_void()

    code = Code(ir.Function(module, ir.FunctionType(POINTER, [POINTER]), kernel.name))
    extension = code.load(code.frame, _EXTENSION, POINTER, of=I8)
    with code.builder.if_then(code.builder.icmp_unsigned("!=", extension, POINTER(None)), likely=False):
        kind = code.load(extension, 8, I32, of=I8)
        with code.builder.if_then(code.builder.icmp_signed("==", kind, I32(_METADATA))):
            metadata = code.load(extension, 24, POINTER, of=I8)
            for offset, number in zip((24, 28), _VERSION, strict=True):
                code.store(I32(number), metadata, offset, of=I8)
        code.builder.ret(POINTER(None))
    _share(code, kernel.num_items(code), item.function)
    code.builder.ret(POINTER(None))
    return module


def serving() -> ir.Module:
    """A module with `SERVE`, a function of the pool's address that never returns."""
    module = ir.Module(SERVE)
    code = Code(ir.Function(module, ir.FunctionType(POINTER, [POINTER]), SERVE))
    b, pool = code.builder, code.frame
    seen = code.variable(_get(code, pool, _CALLS))
    with code.loop_while(lambda: ir.IntType(1)(1)):
        _await_call(code, pool, seen.get())
        seen.set(_get(code, pool, _CALLS))
        _add(code, pool, I64(_INSIDE), 1)
        with b.if_then(b.icmp_signed(">", _get(code, pool, _OPEN), I64(0))):
            work = b.bitcast(
                code.load(pool, _WORK, POINTER, of=I8), ir.FunctionType(ir.VoidType(), [POINTER]).as_pointer()
            )
            b.call(work, [pool])
        _add(code, pool, I64(_INSIDE), -1)
    b.ret(POINTER(None))
    return module


def start(num_threads: int, serve: int) -> int:
    """Start the helpers of so many threads. Returns the address of their pool; 0 if there is none.

    They end with the process. A process that is forked off has none: its callers are alone.

    Args:
        serve: address of the function `SERVE`.
    """
    pool = ctypes.create_string_buffer(_NEXT + _LINE * num_threads)
    address = ctypes.addressof(pool)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # helpers read it to the end
    clear = _Cleared(address, len(pool))
    ctypes.c_int64.from_address(address + _MOST).value = num_threads
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the other threads
    try:
        for _ in range(num_threads - 1):
            code = libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(serve), ctypes.c_void_p(address))
            if code:
                log.warning("a thread of the CPU's kernels cannot be started: %s", os.strerror(code))
                break
            libc.pthread_setname_np(thread, b"jinfercept")
            libc.pthread_detach(thread)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.register_at_fork(after_in_child=clear)
    return address if num_threads > 1 else 0


class _Cleared:
    """Empties the pool in a process that was forked off."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    def __call__(self) -> None:
        most = ctypes.c_int64.from_address(self.address + _MOST)
        value = most.value
        ctypes.memset(self.address, 0, self.size)
        most.value = value


def _share(code: Code, total: Any, item: ir.Function) -> None:
    """Emit that a call's items, `total` of them, are computed by all threads: `item(frame, index)` for every index."""
    b, module = code.builder, code.function.module
    variable = ir.GlobalVariable(module, POINTER, POOL)
    variable.initializer = POINTER(None)  # pyright: ignore[reportAttributeAccessIssue]
    work = _work(module, item)
    pool = b.load(variable)
    has_helpers = b.and_(b.icmp_signed(">", total, I64(1)), b.icmp_unsigned("!=", pool, POINTER(None)))
    is_ours = code.variable(ir.IntType(1)(0))
    with b.if_then(has_helpers):
        is_ours.set(b.extract_value(b.cmpxchg(_place(code, pool, _BUSY), I64(0), I64(1), "seq_cst", "seq_cst"), 1))
    with b.if_else(is_ours.get()) as (together, alone):
        with alone, code.loop(I64(0), total) as index:
            b.call(item, [code.frame, index])
        with together:
            most = code.load(pool, _MOST, I64, of=I8)
            runs = b.select(b.icmp_signed("<", total, most), total, most)
            values = ((_TOTAL, total), (_RUNS, runs), (_FRAME, code.frame), (_WORK, b.bitcast(work, POINTER)))
            for place, value in (*values, (_TAKEN, I64(0))):
                code.store(value, pool, place, of=I8)
            with code.loop(I64(0), runs) as run:
                code.store(_start(code, pool, run), pool, _counter(code, run), of=I8)
            _set(code, pool, _OPEN, 1)
            _add(code, pool, I64(_CALLS), 1)
            with b.if_then(b.icmp_signed(">", _get(code, pool, _ASLEEP), I64(0)), likely=False):
                _futex(code, pool, _WAKE, _EVERYBODY)
            b.call(work, [pool])
            _set(code, pool, _OPEN, 0)
            with code.loop_while(lambda: b.icmp_signed(">", _get(code, pool, _INSIDE), I64(0))):
                code.call("sched_yield", I32)
            _set(code, pool, _BUSY, 0)


def _work(module: ir.Module, item: ir.Function) -> ir.Function:
    """A function of the pool's address: computes items of one run, and then of the next ones, until none is left."""
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work"))
    b, pool = code.builder, code.frame
    runs, frame = code.load(pool, _RUNS, I64, of=I8), code.load(pool, _FRAME, POINTER, of=I8)
    first = _add(code, pool, I64(_TAKEN), 1)
    with code.loop(first, b.add(first, runs)) as turn:
        run = b.srem(turn, runs)
        end, counter = _start(code, pool, b.add(run, I64(1))), _counter(code, run)
        index = code.variable(_add(code, pool, counter, 1))
        with code.loop_while(lambda end=end, index=index: b.icmp_signed("<", index.get(), end)):
            b.call(item, [frame, index.get()])
            index.set(_add(code, pool, counter, 1))
    b.ret_void()
    return code.function


def _await_call(code: Code, pool: Any, seen: Any) -> None:
    """Return when there was another call than those seen: at first without sleeping, but giving way to other threads."""
    b = code.builder
    began = code.call("llvm.readcyclecounter", I64)

    def waits() -> Any:
        return b.icmp_signed("==", _get(code, pool, _CALLS), seen)

    def is_early() -> Any:
        return b.icmp_unsigned("<", b.sub(code.call("llvm.readcyclecounter", I64), began), I64(AWAKE_CYCLES))

    with code.loop_while(lambda: b.and_(waits(), is_early())):
        for _ in range(16):
            code.call("llvm.x86.sse2.pause", ir.VoidType())
        code.call("sched_yield", I32)
    _add(code, pool, I64(_ASLEEP), 1)
    with code.loop_while(waits):
        _futex(code, pool, _WAIT, b.trunc(seen, I32))
    _add(code, pool, I64(_ASLEEP), -1)


def _futex(code: Code, pool: Any, operation: int, value: Any) -> None:
    """Sleep while the count of calls is `value`, or wake so many that do."""
    value = I32(value) if isinstance(value, int) else value
    code.call("syscall", I64, I64(_FUTEX), code.at(pool, _CALLS), I32(operation), value, POINTER(None))


def _start(code: Code, pool: Any, run: Any) -> Any:
    """The first item of a run."""
    total, runs = (code.load(pool, place, I64, of=I8) for place in (_TOTAL, _RUNS))
    return code.builder.sdiv(code.builder.mul(total, run), runs)


def _counter(code: Code, run: Any) -> Any:
    """Where in the pool a run has the number of its next item."""
    return code.builder.add(code.builder.mul(run, I64(_LINE)), I64(_NEXT))


def _place(code: Code, pool: Any, offset: Any) -> Any:
    return code.builder.bitcast(code.at(pool, offset), I64.as_pointer())


def _get(code: Code, pool: Any, offset: int) -> Any:
    return code.builder.load_atomic(_place(code, pool, offset), "seq_cst", 8)


def _set(code: Code, pool: Any, offset: int, value: int) -> None:
    code.builder.atomic_rmw("xchg", _place(code, pool, offset), I64(value), "seq_cst")


def _add(code: Code, pool: Any, offset: Any, number: int) -> Any:
    """The number before."""
    return code.builder.atomic_rmw("add", _place(code, pool, offset), I64(number), "seq_cst")
