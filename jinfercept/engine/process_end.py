"""The end of the interpreter, and Ctrl-C: threads stop before, since one that is still inside JAX then aborts the process.

`atexit` calls the last function registered first, and JAX registers its clean-up when it is imported. So functions that are
registered here later run before JAX frees its devices, and after other threads than daemons have ended.
"""

import atexit
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, MethodType
from typing import Final
from weakref import WeakMethod, finalize

LONGEST_END_S: Final = 30.0
"""Seconds that the end of the process waits for a thread, at most: a step or a compilation cannot be interrupted."""
_UNWINDING_S: Final = 3.0
"""The same for a thread that frees what it had begun to compile, if the user's code does not go on with it."""


def call_at_exit(method: MethodType) -> Callable[[], None]:
    """Call a bound method when the interpreter ends, if its object still exists then. Returns a function that cancels this."""
    reference = WeakMethod(method)

    def call() -> None:
        if (bound := reference()) is not None:
            bound()

    atexit.register(call)
    cancel = finalize(method.__self__, atexit.unregister, call)
    cancel.atexit = False
    return cancel


@contextmanager
def ending_at_exit() -> Iterator[None]:
    """If the interpreter ends while a daemon thread is in the body, raise `SystemExit` in that thread, and wait for it."""
    thread, thread_id = threading.current_thread(), threading.get_ident()
    process_id, ended = os.getpid(), threading.Event()
    if thread is threading.main_thread():
        yield
        return

    def end() -> None:
        if os.getpid() == process_id:  # a forked child does not have this thread
            # arrives between two steps of Python code
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit))
            ended.wait(LONGEST_END_S)
            with suppress(AssertionError):  # a thread that Python did not start
                thread.join(_UNWINDING_S)

    atexit.register(end)
    try:
        if not threading.main_thread().is_alive():  # what is registered now may not be called
            raise SystemExit
        yield
    finally:
        ended.set()
        atexit.unregister(end)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block. It arrives on the main thread only, where it could end any step halfway."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(*arrived[-1])
