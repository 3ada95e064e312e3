"""Threads in which tenants take turns: no tenant has all of them, and the waiting jobs of a tenant are bounded.

A job whose client disconnects is dropped if it has not begun. Everything but the jobs themselves runs on the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from jinfercept.sched.tenants import FairSlots
from jinfercept.serve.protocols.errors import ApiError, aborted

MAX_WAITING_BYTES = 2**26
"""Maximum input of the waiting jobs of one tenant in a pool."""
RETRY_S = 1
"""Seconds after which a refused client may retry."""


@final
class TenantPool:
    """Threads in which the tenants take turns.

    Args:
        per_tenant: threads that one tenant may use at a time.
        max_waiting: jobs that one tenant may have waiting.
    """

    def __init__(self, name: str, num_threads: int, per_tenant: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"jinfercept-{name}")
        self._slots, self._max_waiting = FairSlots(num_threads, per_tenant), max_waiting
        self._waiting, self._waiting_bytes = Counter[str](), Counter[str]()
        self._ends = set[asyncio.Future[None]]()  # of those who wait for running jobs
        self._closed = False

    async def run[T](self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs a function in a thread: returns its result, or raises its exception. If cancelled, a waiting job is dropped, and
        a running one continues without effect.

        Args:
            num_bytes: approximate size of the input.
            work: the function. Its time has to be bounded, since a thread cannot be stopped.

        Raises:
            ApiError: 429 if the tenant has too many waiting jobs, 503 once the pool is closed.
        """
        await self._begin(tenant, num_bytes)
        loop = asyncio.get_running_loop()
        running, end = loop.run_in_executor(self._pool, work), loop.create_future()

        def ended(running: asyncio.Future[Any]) -> None:
            running.exception()  # retrieved also if its client has gone
            self._slots.end(tenant)

        running.add_done_callback(ended)
        self._ends.add(end)
        try:
            await asyncio.wait((running, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ends.discard(end)
        if not running.done():
            raise aborted()
        return running.result()

    def close(self) -> None:
        """Fail all waiting and running jobs with 503. Running functions continue in their threads without effect."""
        self._closed = True
        self._slots.close(aborted())
        for end in self._ends:
            if not end.done():
                end.set_result(None)
        self._pool.shutdown(wait=False)

    async def _begin(self, tenant: str, num_bytes: int) -> None:
        """Wait for a thread."""
        number, waiting_bytes = self._waiting[tenant], self._waiting_bytes[tenant]
        if number and (number >= self._max_waiting or waiting_bytes + num_bytes > MAX_WAITING_BYTES):
            raise ApiError(
                429,
                f"{number} requests of this key, of {waiting_bytes} bytes, wait to be read; got one more; "
                f"fix: send fewer at a time",
                code="queue_full",
                headers={"Retry-After": f"{RETRY_S}"},
            )
        self._count(tenant, 1, num_bytes)
        try:
            if not self._closed:
                await self._slots.begin(tenant)
        finally:
            self._count(tenant, -1, -num_bytes)
        if self._closed:
            raise aborted()

    def _count(self, tenant: str, number: int, num_bytes: int) -> None:
        self._waiting[tenant] += number
        self._waiting_bytes[tenant] += num_bytes
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._waiting_bytes[tenant]
