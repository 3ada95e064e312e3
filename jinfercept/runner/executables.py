"""Functions compiled ahead of time for fixed shapes. A function that was not added is never compiled.

An executable that `compile` left out is compiled, or read from disk, by a background thread or by its first call, which waits
and says so in the log. Callers that can use another one check `missing` before.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from queue import SimpleQueue
from typing import Any, Self, final

import jax

from jinfercept.cpu_kernels.machine import num_processors
from jinfercept.models.jax_settings import check_settings, own_settings

log = logging.getLogger(__name__)

COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""On a GPU, XLA would merge products of one operand by joining their weights: a copy of them in every step."""
NO_OPTIONS = ("tpu",)
"""Platforms whose compiler knows none of them."""
_SEVERAL_HOSTS = {"xla_gpu_shard_autotuning": False}
"""Several processes would time kernels for each other, and each wait for executables that another compiles in its own order."""
_UNTUNED = {"xla_gpu_autotune_level": 0}
"""Behind requests kernels are not timed: these would be timed, too, and the pages have taken the memory for it."""

QUIET_S, LONGEST_WAIT_S = 0.5, 5.0
"""Seconds without a call before an executable is compiled behind the calls, and most seconds of waiting for such a pause."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a task, the number of its parts that are done, and their total."""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@final
class Executables:
    """A set of executables by key: add all, compile them together or as they are needed, then call them.

    Attributes:
        compile_s: seconds of tracing and compiling, by key; several may run in parallel.
        ready: the compiled executables of this part of the set.
        missing: keys of this part's executables that are not compiled yet.
    """

    def __init__(self) -> None:
        self.compile_s: dict[Hashable, float] = {}
        self.ready: dict[Hashable, jax.stages.Compiled] = {}
        self.missing: set[Hashable] = set()
        self._lock = threading.Lock()
        self._pending: dict[Hashable, Callable[[], jax.stages.Lowered]] = {}
        self._begun: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._owners: dict[Hashable, tuple[Executables, Hashable]] = {}  # the part, and the key in it
        self._prefix: tuple[Hashable, ...] = ()
        self._rest: threading.Thread | None = None
        self._stopped, self._behind = threading.Event(), threading.Event()
        self._called_s = [0.0]  # when an executable was last called; the parts share it

    def under(self, name: str) -> Self:
        """A part of the same set, whose keys are prefixed with `name`. Its executables are compiled with the others."""
        part = copy(self)
        part._prefix, part.ready, part.missing = (*self._prefix, name), {}, set()
        return part

    def add(self, key: Hashable, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> None:
        """Add a function to compile. Its arguments may be freed or donated afterwards.

        Args:
            function: a pure function.
            arguments: arrays, or shapes with shardings, like those of the calls.
            donate: indices of the arguments whose memory it may reuse.
        """
        shapes = jax.tree.map(_shape, arguments)
        self.missing.add(key)
        self._owners[whole := self.whole(key)] = self, key
        self._pending[whole] = lambda: jax.jit(function, donate_argnums=tuple(donate)).lower(*shapes)

    def compile(
        self, progress: Progress = silent, most_at_once: int | None = None, only: Iterable[Hashable] | None = None
    ) -> None:
        """Compile the added functions in parallel. An exception or an interrupt waits for compilations that have begun.

        Args:
            most_at_once: compilations at the same time; None: one for each processor.
            only: keys as in `pending`; None: all.
        """
        keys, results = deque(self._pending if only is None else only), SimpleQueue[BaseException | None]()
        count = len(keys)

        def compile_next() -> None:
            while keys:
                with suppress(IndexError):  # another thread took the last one
                    results.put(self._failure(keys.popleft()))

        # not an executor's threads: at the end of the interpreter these would compile all of the rest first
        num_threads = min(count, most_at_once or num_processors())
        threads = [threading.Thread(target=compile_next, daemon=True) for _ in range(num_threads)]
        try:
            for thread in threads:
                thread.start()
            for done in range(count):
                failure = results.get()
                progress("compiling", done, count)
                if failure is not None:
                    raise failure
        finally:
            keys.clear()
            for thread in threads:
                if thread.is_alive():  # else it finds no key, if an interrupt came while it was started
                    thread.join()
        progress("compiling", count, count)

    def compile_behind(self) -> None:
        """Start a thread that compiles what is left, one after the other, between the calls. `close` ends it."""
        if not self._pending:
            return
        log.info("%d executables are compiled behind the first requests, which run on larger ones", len(self._pending))
        self._behind.set()
        self._rest = threading.Thread(target=self._compile_rest, name="executables")
        self._rest.start()

    def close(self) -> None:
        """End the thread of `compile_behind`, after the compilation that it has begun."""
        self._stopped.set()
        if self._rest is not None:
            self._rest.join()

    @property
    def pending(self) -> tuple[Hashable, ...]:
        """Keys of this part's executables whose compilation has not begun."""
        if not self._prefix:
            return tuple(self._pending)
        size = len(self._prefix)
        own = [key[size:] for key in self._pending if isinstance(key, tuple) and key[:size] == self._prefix]
        return tuple(key[0] if len(key) == 1 else key for key in own)

    @property
    def num_pending(self) -> int:
        """Executables of the whole set whose compilation has not begun."""
        return len(self._pending)

    @property
    def extra_bytes(self) -> int:
        """Device memory, in bytes, that all executables take together beside their arguments: temporaries and new results."""
        analyses = [part.ready[key].memory_analysis() for part, key in self._owners.values() if key in part.ready]
        return sum(
            analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            for analysis in analyses
            if analysis is not None
        )

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        """The executable, compiled now or waited for if it is not ready. Raises `KeyError` if it was not added."""
        self._called_s[0] = time.monotonic()
        return self.ready.get(key) or self._obtain_for_call(self.whole(key))

    def whole(self, key: Hashable) -> Hashable:
        """The key in the whole set."""
        return (*self._prefix, key) if self._prefix else key

    def _obtain_for_call(self, key: Hashable) -> jax.stages.Compiled:
        began_s = time.monotonic()
        compiled = self._obtain(key)
        if self._behind.is_set():
            log.info(
                "a step waited %.1f s for an executable that was not compiled yet: %s", time.monotonic() - began_s, key
            )
        return compiled

    def _obtain(self, key: Hashable) -> jax.stages.Compiled:
        with self._lock:  # of several threads that need the same executable, one compiles it
            if (lower := self._pending.get(key)) is not None:
                self._begun[key] = Future()
                del self._pending[key]
            future = self._begun[key]
        if lower is None:
            return future.result()
        began_s = time.monotonic()
        try:
            check_settings()
            with own_settings():
                compiled = lower().compile(compiler_options=_options(tuned=not self._behind.is_set()))
        except BaseException as error:
            with self._lock:
                self._pending[key] = lower  # the next call tries again
                del self._begun[key]
            future.set_exception(error)
            raise
        self.compile_s[key] = time.monotonic() - began_s
        part, own_key = self._owners[key]
        part.ready[own_key] = compiled
        part.missing.discard(own_key)
        future.set_result(compiled)
        return compiled

    def _failure(self, key: Hashable) -> BaseException | None:
        try:
            self._obtain(key)
        except BaseException as error:
            return error
        return None

    def _compile_rest(self) -> None:
        for key in list(self._pending):
            latest = time.monotonic() + LONGEST_WAIT_S
            while not self._ends() and (wait_s := min(self._called_s[0] + QUIET_S, latest) - time.monotonic()) > 0:
                self._stopped.wait(min(wait_s, 1.0))
            if self._ends():
                return
            try:
                self._obtain(key)
            except Exception as error:  # the step that needs it will raise it
                log.warning("an executable cannot be compiled yet: %s", error)
        log.info("all executables are compiled")

    def _ends(self) -> bool:
        return self._stopped.is_set() or not threading.main_thread().is_alive()


def _options(*, tuned: bool) -> dict[str, Any]:
    if jax.default_backend() in NO_OPTIONS:
        return {}
    return COMPILER_OPTIONS | ({} if jax.process_count() == 1 else _SEVERAL_HOSTS) | ({} if tuned else _UNTUNED)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
