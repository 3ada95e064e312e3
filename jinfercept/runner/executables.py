"""Functions compiled ahead of time for fixed shapes. Others cannot be called, so that nothing compiles after warm-up."""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, final

import jax

COMPILER_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""On a GPU, XLA would merge products of one operand by joining their weights: a copy of them in every step."""
_SEVERAL_HOSTS = {"xla_gpu_shard_autotuning": False}
"""Several processes would time kernels for each other, and each wait for executables that another compiles in its own order."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a task, the number of its parts that are done, and their total."""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@final
class Executables:
    """A set of executables by key: add them all, compile them together, call them.

    Attributes:
        compile_s: seconds of tracing and compiling, by key; they ran in parallel.
    """

    def __init__(self) -> None:
        self.compile_s: dict[Hashable, float] = {}
        self._pending: dict[Hashable, Callable[[], jax.stages.Lowered]] = {}
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def add(self, key: Hashable, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> None:
        """Add a function to compile.

        Args:
            key: selects the executable.
            function: a pure function.
            arguments: arrays, or shapes with shardings, like those of the calls.
            donate: indices of the arguments whose memory it may reuse.
        """
        self._pending[key] = lambda: jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)

    def compile(self, progress: Progress = silent) -> None:
        """Compile the added functions, in parallel."""
        total = len(self._pending)
        options = COMPILER_OPTIONS if jax.process_count() == 1 else COMPILER_OPTIONS | _SEVERAL_HOSTS

        def build(
            key: Hashable, lower: Callable[[], jax.stages.Lowered]
        ) -> tuple[Hashable, jax.stages.Compiled, float]:
            began_s = time.monotonic()
            return key, lower().compile(compiler_options=options), time.monotonic() - began_s

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = [pool.submit(build, key, lower) for key, lower in self._pending.items()]
            for done, future in enumerate(as_completed(futures)):
                progress("compiling", done, total)
                key, compiled, seconds = future.result()
                self._compiled[key], self.compile_s[key] = compiled, seconds
        progress("compiling", total, total)
        self._pending.clear()

    @property
    def extra_bytes(self) -> int:
        """Device memory, in bytes, of all executables together beside their arguments: temporaries and new results."""
        analyses = [compiled.memory_analysis() for compiled in self._compiled.values()]
        return sum(
            analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            for analysis in analyses
            if analysis is not None
        )

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        return self._compiled[key]
