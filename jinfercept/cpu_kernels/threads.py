"""Handlers of the CPU kernels, which XLA calls: the items are computed by the caller and by helpers, threads for all kernels.

XLA has a pool of as many threads as the process has cores, and the caller is one more. With kernels in that pool, two threads
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

from llvmlite import ir

from jinfercept.cpu_kernels.code import I1, I8, I32, I64, POINTER, VOID, Buffer, Code, Kernel, Operand, Value

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
_WORK_TYPE = ir.FunctionType(VOID, [POINTER])


def handler(name: str, kernel: Kernel) -> ir.Module:
    """A module with the kernel's FFI handler, a function of this name."""
    module = ir.Module(name)
    item = Code(ir.Function(module, ir.FunctionType(VOID, [POINTER, I64]), "item"))
    kernel.item(item, Value(item, item.function.args[1]))
    item.builder.ret_void()

    code = Code(ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name))
    extension = code.pointer(code.frame, _EXTENSION)
    is_there = Value(code, code.builder.icmp_unsigned("!=", extension.address.llvm, POINTER(None)))
    with code.when(is_there, likely=False):
        with code.when((extension + 8).of(I32)[0].equals(_METADATA)):
            version = (code.pointer(extension, 24) + 24).of(I32)
            for place, number in enumerate(_VERSION):
                version[place] = code.number(number, I32)
        code.builder.ret(POINTER(None))
    _share(code, kernel.num_items(code), item.function)
    code.builder.ret(POINTER(None))
    return module


def serving() -> ir.Module:
    """A module with `SERVE`, a function of the pool's address that never returns."""
    module = ir.Module(SERVE)
    code = Code(ir.Function(module, ir.FunctionType(POINTER, [POINTER]), SERVE))
    pool = code.frame
    seen = code.variable(_get(pool, _CALLS))
    with code.loop_while(lambda: code.number(1, I1)):
        _await_call(code, pool, seen.value)
        seen.value = _get(pool, _CALLS)
        _add(pool, _INSIDE, 1)
        with code.when(_get(pool, _OPEN) > 0):
            work = code.builder.inttoptr(_number(pool, _WORK).llvm, _WORK_TYPE.as_pointer())
            code.builder.call(work, [pool.address.llvm])
        _add(pool, _INSIDE, -1)
    code.builder.ret(POINTER(None))
    return module


def start(num_threads: int, serve: int) -> int:
    """Start the helpers of so many threads. Returns the address of their pool; 0 if there is none.

    They end with the process. A forked process has none: its callers are alone. `serve` is the address of the function `SERVE`.
    """
    pool = ctypes.create_string_buffer(_NEXT + _LINE * num_threads)
    address = ctypes.addressof(pool)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # helpers read it to the end
    ctypes.c_int64.from_address(address + _MOST).value = num_threads

    def clear() -> None:
        ctypes.memset(address, 0, len(pool))
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


def _share(code: Code, total: Value, item: ir.Function) -> None:
    b, module = code.builder, code.function.module
    variable = ir.GlobalVariable(module, POINTER, POOL)
    variable.initializer = POINTER(None)  # pyright: ignore[reportAttributeAccessIssue]
    work = _work(module, item)
    pool = Buffer(code, Value(code, b.load(variable, typ=POINTER)), I8)
    has_helpers = (total > 1) & Value(code, b.icmp_unsigned("!=", pool.address.llvm, POINTER(None)))
    is_ours = code.variable(code.number(0, I1))
    with code.when(has_helpers):
        swapped = b.cmpxchg((pool + _BUSY).address.llvm, I64(0), I64(1), "seq_cst", "seq_cst")
        is_ours.value = Value(code, b.extract_value(swapped, 1))
    with b.if_else(is_ours.value.llvm) as (together, alone):
        with alone, code.loop(0, total) as index:
            b.call(item, [code.frame.address.llvm, index.llvm])
        with together:
            runs = code.least(total, _number(pool, _MOST))
            for place, value in ((_TOTAL, total), (_RUNS, runs), (_TAKEN, code.number(0))):
                (pool + place).of(I64)[0] = value
            for place, address in ((_FRAME, code.frame.address), (_WORK, Value(code, b.bitcast(work, POINTER)))):
                (pool + place).of(POINTER)[0] = address
            with code.loop(0, runs) as run:
                (pool + _counter(run)).of(I64)[0] = _start(pool, run)
            _set(pool, _OPEN, 1)
            _add(pool, _CALLS, 1)
            with code.when(_get(pool, _ASLEEP) > 0, likely=False):
                _futex(pool, _WAKE, _EVERYBODY)
            b.call(work, [pool.address.llvm])
            _set(pool, _OPEN, 0)
            with code.loop_while(lambda: _get(pool, _INSIDE) > 0):
                code.call("sched_yield", I32)
            _set(pool, _BUSY, 0)


def _work(module: ir.Module, item: ir.Function) -> ir.Function:
    code = Code(ir.Function(module, _WORK_TYPE, "work"))
    pool = code.frame
    runs, frame = _number(pool, _RUNS), code.pointer(pool, _FRAME).address.llvm
    first = _add(pool, _TAKEN, 1)
    # the items of one run, and then of the next ones, until none is left
    with code.loop(first, first + runs) as turn:
        run = turn % runs
        end, counter = _start(pool, run + 1), _counter(run)
        index = code.variable(_add(pool, counter, 1))
        with code.loop_while(lambda end=end, index=index: index.value < end):
            code.builder.call(item, [frame, index.value.llvm])
            index.value = _add(pool, counter, 1)
    code.builder.ret_void()
    return code.function


def _await_call(code: Code, pool: Buffer, seen: Value) -> None:
    began = code.call("llvm.readcyclecounter", I64)

    def waits() -> Value:
        return _get(pool, _CALLS).equals(seen)

    # at first without sleeping, but giving way to other threads
    with code.loop_while(lambda: waits() & (code.call("llvm.readcyclecounter", I64) - began < AWAKE_CYCLES)):
        for _ in range(16):
            code.call("llvm.x86.sse2.pause", VOID)
        code.call("sched_yield", I32)
    _add(pool, _ASLEEP, 1)
    with code.loop_while(waits):
        _futex(pool, _WAIT, seen.to(I32))
    _add(pool, _ASLEEP, -1)


def _futex(pool: Buffer, operation: int, value: Operand) -> None:
    """Sleep while the count of calls is `value`, or wake so many that do."""
    code, nothing = pool.code, Value(pool.code, POINTER(None))
    numbers = code.number(operation, I32), code.number(value, I32)
    code.call("syscall", I64, code.number(_FUTEX), (pool + _CALLS).address, *numbers, nothing)


def _start(pool: Buffer, run: Value) -> Value:
    return _number(pool, _TOTAL) * run // _number(pool, _RUNS)


def _counter(run: Value) -> Value:
    return run * _LINE + _NEXT


def _number(pool: Buffer, place: int) -> Value:
    return (pool + place).of(I64)[0]


def _get(pool: Buffer, place: int) -> Value:
    load = pool.code.builder.load_atomic
    return Value(pool.code, load((pool + place).address.llvm, "seq_cst", 8, typ=I64))


def _set(pool: Buffer, place: int, value: int) -> None:
    pool.code.builder.atomic_rmw("xchg", (pool + place).address.llvm, I64(value), "seq_cst")


def _add(pool: Buffer, place: Operand, number: int) -> Value:
    # returns the number before
    add = pool.code.builder.atomic_rmw
    return Value(pool.code, add("add", (pool + place).address.llvm, I64(number), "seq_cst"))
