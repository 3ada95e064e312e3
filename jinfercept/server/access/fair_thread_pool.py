"""Threads that prepare requests for the engine: they read large bodies, render, tokenise and compile grammars.

Light and heavy jobs, by the size of their input, have separate pools, so that long texts never delay short ones. In each pool
the API keys take turns, no key has all threads, and the waiting jobs of a key are bounded. A job whose client disconnects is
dropped if it has not begun. Everything but the jobs themselves runs on the event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

from jinfercept.protocols.errors import ApiError

HEAVY_BYTES = 2**16
"""Input of the largest light job. A larger one takes a tenth of a second and more."""
MAX_WAITING_BYTES = 2**26
"""Maximum input of the waiting jobs of one key in a pool."""
RETRY_S = 1
"""Seconds after which a refused client may retry."""


@final
class FairThreadPool:
    """The preparation threads of a server.

    Args:
        max_waiting: jobs that one key may have waiting in each pool.
    """

    def __init__(self, max_waiting: int) -> None:
        self._light = KeyedPool("light", num_threads=4, per_key=3, max_waiting=max_waiting)
        self._heavy = KeyedPool("heavy", num_threads=2, per_key=1, max_waiting=max_waiting)

    async def run[T](self, key: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs a function in a thread: returns its result, or raises its exception. If cancelled, a waiting job is dropped, and
        a running one continues without effect.

        Args:
            key: the API key's tenant.
            num_bytes: approximate size of the input.
            work: the function. Its time has to be bounded, since a thread cannot be stopped.

        Raises:
            ApiError: 429 if the key has too many waiting jobs, 503 once the pool is closed.
        """
        pool = self._heavy if num_bytes > HEAVY_BYTES else self._light
        return await pool.run(key, num_bytes, work)

    def close(self) -> None:
        """Fail all waiting and running jobs with 503. Running functions continue in their threads without effect."""
        self._light.close()
        self._heavy.close()


@final
@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    num_bytes: int
    done: asyncio.Future[Any]


@final
class KeyedPool:
    """Threads in which the keys take turns.

    Args:
        name: of the threads.
        num_threads: of all keys together.
        per_key: threads that one key may use at a time.
        max_waiting: jobs that one key may have waiting.
    """

    def __init__(self, name: str, num_threads: int, per_key: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"jinfercept-{name}")
        self._num_free, self._per_key, self._max_waiting = num_threads, per_key, max_waiting
        self._waiting: dict[str, deque[_Job]] = {}  # first the key whose turn is next
        self._running: dict[_Job, str] = {}
        self._closed = False

    async def run(self, key: str, num_bytes: int, work: Callable[[], Any]) -> Any:
        if self._closed:
            raise _aborted()
        job = _Job(work, num_bytes, asyncio.get_running_loop().create_future())
        self._add(key, job)
        self._start()
        try:
            return await job.done
        finally:
            self._drop(key, job)

    def close(self) -> None:
        self._closed = True
        for job in [*self._running, *(job for jobs in self._waiting.values() for job in jobs)]:
            if not job.done.done():
                job.done.set_exception(_aborted())
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, key: str, job: _Job) -> None:
        jobs = self._waiting.get(key, deque[_Job]())
        num_bytes = sum(other.num_bytes for other in jobs)
        if jobs and (len(jobs) >= self._max_waiting or num_bytes + job.num_bytes > MAX_WAITING_BYTES):
            raise ApiError(
                429,
                f"{len(jobs)} requests of this key, of {num_bytes} bytes, wait to be read; got one more; "
                f"fix: send fewer at a time",
                code="queue_full",
                headers={"Retry-After": f"{RETRY_S}"},
            )
        jobs.append(job)
        self._waiting[key] = jobs

    def _drop(self, key: str, job: _Job) -> None:
        """Remove a job that has not begun."""
        jobs = self._waiting.get(key, ())
        if job in jobs:
            self._set_waiting(key, deque(other for other in jobs if other is not job))

    def _set_waiting(self, key: str, jobs: deque[_Job]) -> None:
        if jobs:
            self._waiting[key] = jobs
        else:
            self._waiting.pop(key, None)

    def _start(self) -> None:
        """Begin jobs while threads are free: one of each key in turn."""
        busy = Counter(self._running.values())
        while self._num_free:
            key = next((key for key in self._waiting if busy[key] < self._per_key), None)
            if key is None:
                return
            jobs = self._waiting.pop(key)
            job = jobs.popleft()
            self._set_waiting(key, jobs)  # last in turn
            if not job.done.done():  # else its client has disconnected
                busy[key] += 1
                self._begin(key, job)

    def _begin(self, key: str, job: _Job) -> None:
        self._num_free -= 1
        self._running[job] = key
        running = asyncio.get_running_loop().run_in_executor(self._pool, job.work)
        running.add_done_callback(lambda running: self._end(job, running))

    def _end(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._num_free += 1
        del self._running[job]
        error = None if running.cancelled() else running.exception()
        if not job.done.done():
            if error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        if not self._closed:
            self._start()


def _aborted() -> ApiError:
    return ApiError(503, "the server gave the request up", code="aborted")
