"""Threads for functions that may hang: no tool waits for another one's, and none of them keeps the process from ending."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from jinfercept.intercept.current_call import CURRENT_CALL

MOST_THREADS = 32
"""Threads of one tool in a pool. More of its functions wait for those."""


@final
class DaemonPool(ThreadPoolExecutor):
    """The default executor of an event loop: runs what `asyncio.to_thread` and name look-ups are given in daemon threads."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # of which no thread is ever started
        self._turn = threading.Lock()
        self._num_threads = Counter[str]()
        self._jobs: dict[str, deque[Callable[[], None]]] = {}

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function. Raises `RuntimeError` if the process has no more threads."""
        future, tool = Future[T](), CURRENT_CALL.get().tool

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except (StopIteration, StopAsyncIteration) as error:  # those never reach a coroutine
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        with self._turn:
            jobs = self._jobs.setdefault(tool, deque())
            jobs.append(job)
            if self._num_threads[tool] >= MOST_THREADS:
                return future
            self._num_threads[tool] += 1
            try:
                threading.Thread(target=self._serve, args=(tool,), name="jinfercept-tool", daemon=True).start()
            except RuntimeError:
                self._num_threads[tool] -= 1
                if not self._num_threads[tool]:
                    jobs.remove(job)
                    raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop what waits; running functions go on."""
        with self._turn:
            self._jobs.clear()

    def _serve(self, tool: str) -> None:
        """Run the tool's functions until none waits."""
        while True:
            with self._turn:
                jobs: Any = self._jobs.get(tool)
                if not jobs:
                    self._num_threads[tool] -= 1
                    return
                job = jobs.popleft()
            job()
