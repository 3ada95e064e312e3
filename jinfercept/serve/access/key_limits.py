"""Limits of each API key: requests in progress, requests and tokens per minute; and their turns on the threads that read large
bodies, render, tokenise and compile grammars."""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from starlette.requests import Request

from jinfercept.errors import ConfigError
from jinfercept.sched.tenants import FairSlots
from jinfercept.serve.access.key_file import KeyRules
from jinfercept.serve.access.keys import Keys
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.process import trim_heap
from jinfercept.serve.protocols.errors import ApiError, aborted

MAX_WAITING_BYTES = 2**26
"""Maximum input of the waiting jobs of one tenant in a pool."""
RETRY_S = 1
"""Seconds after which a refused client may retry."""


@final
class TenantPool:
    """Threads in which the tenants take turns. A job whose client disconnects is dropped if it has not begun.

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
        """Runs a function in a thread. If cancelled, a waiting job is dropped, and a running one continues without effect.

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


log = logging.getLogger("jinfercept.serve")

POLL_S = 2.0
"""Seconds between two looks at the file of keys."""
_IDLE_S = 1.0
"""Seconds without requests after which freed memory is returned to the system."""
_MINUTE_S = 60.0
HEAVY_BYTES = 2**16
"""Input of the largest light job. A larger one takes a tenth of a second and more."""
_MOST_RETRY_S = 60
"""Largest `Retry-After`: clients of OpenAI's protocol heed none above."""


@final
class TokenBucket:
    """So many units per minute on average, and as many at once. What is taken afterwards may leave a debt."""

    def __init__(self, now: float) -> None:
        self._used, self._at_s = 0.0, now

    def wait_s(self, number: int, per_minute: int, now: float) -> float:
        """Seconds until so many may be taken; 0 if they may now."""
        self._used = max(0.0, self._used - per_minute * (now - self._at_s) / _MINUTE_S)
        self._at_s = now
        return max(0.0, (self._used + number - per_minute) * _MINUTE_S / per_minute)

    def take(self, number: float) -> None:
        self._used += number


@dataclass(slots=True)
class _Use:
    requests: TokenBucket
    tokens: TokenBucket
    in_progress: int = 0


@final
class KeyLimits:
    """Counts the use of the keys. `now` is a monotonic clock."""

    def __init__(self, rules: Callable[[str], KeyRules], now: Callable[[], float]) -> None:
        self._rules, self._now = rules, now
        self._uses: dict[str, _Use] = {}

    def check(self, tenant: str, number: int, preparing: int) -> None:
        """Take requests of a key, of which `preparing` others are not submitted yet.

        Raises:
            ApiError: 429 for now, 400 for more requests than the key may ever have at once.
        """
        rules = self._rules(tenant)
        most = min(rules.max_concurrent or math.inf, rules.requests_per_minute or math.inf)
        if number > most:
            raise ApiError.bad(f"this API key may ask for {most} answers; got {number}; fix: a smaller n", "n")
        use, now = self._use(tenant), self._now()
        if rules.max_concurrent is not None and preparing + use.in_progress + number > rules.max_concurrent:
            ahead = f"{preparing + use.in_progress} requests of this key are in progress"
            message = f"{ahead}, {rules.max_concurrent} may; got {number} more"
            raise _limited(message, "concurrency_limit_exceeded", RETRY_S)
        for limited, bucket, least, limit in (
            ("requests", use.requests, number, rules.requests_per_minute),
            ("tokens", use.tokens, 1, rules.tokens_per_minute),
        ):
            if limit is not None and (wait_s := bucket.wait_s(least, limit, now)):
                raise _limited(f"this key may use {limit} {limited} per minute", "rate_limit_exceeded", wait_s)
        use.requests.take(number)

    def began(self, tenant: str, number: int, num_tokens: int) -> None:
        """Requests of a key are submitted: count them as in progress, and their prompts."""
        use = self._use(tenant)
        use.in_progress += number
        use.tokens.take(num_tokens)

    def ended(self, tenant: str, number: int, num_tokens: int) -> None:
        """Requests of a key are over, having generated so many tokens."""
        use = self._use(tenant)
        use.in_progress -= number
        use.tokens.take(num_tokens)

    def forget(self, tenants: Callable[[str], bool]) -> None:
        """Forget idle keys but those for which `tenants` is true."""
        self._uses = {tenant: use for tenant, use in self._uses.items() if use.in_progress or tenants(tenant)}

    def _use(self, tenant: str) -> _Use:
        use = self._uses.get(tenant)
        if use is None:
            now = self._now()
            use = self._uses[tenant] = _Use(TokenBucket(now), TokenBucket(now))
        return use


def _limited(message: str, code: str, wait_s: float) -> ApiError:
    retry_s = min(max(RETRY_S, math.ceil(wait_s)), _MOST_RETRY_S)
    return ApiError(429, message, code=code, headers={"Retry-After": f"{retry_s}"})


@final
class FairThreadPool:
    """The preparation threads of a server, others for long texts. Keys take turns, as in `TenantPool`."""

    def __init__(self, max_waiting: int) -> None:
        self._light = TenantPool("light", num_threads=4, per_tenant=3, max_waiting=max_waiting)
        self._heavy = TenantPool("heavy", num_threads=2, per_tenant=1, max_waiting=max_waiting)

    async def run[T](self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        pool = self._heavy if num_bytes > HEAVY_BYTES else self._light
        return await pool.run(tenant, num_bytes, work)

    def close(self) -> None:
        self._light.close()
        self._heavy.close()


@final
class OpenSockets:
    """The open WebSockets, as many as the options allow."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._tenants: dict[Callable[[], object], str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def open(self, tenant: str, end: Callable[[], object]) -> None:
        """Count one, whose `end` is called at the drain. Raises `ApiError` for too many: 429 of the key, 503 in all."""
        options, own = self._options, sum(tenant == other for other in self._tenants.values())
        if own >= options.max_websockets:
            message = (
                f"an API key may have {options.max_websockets} WebSockets open; this one has {own}; fix: close some"
            )
            raise _limited(message, "too_many_websockets", RETRY_S)
        if len(self) >= max(1, options.max_connections // 2):
            raise ApiError(
                503,
                "too many WebSockets are open; fix: use HTTP",
                code="too_many_websockets",
                headers={"Retry-After": f"{RETRY_S}"},
            )
        self._tenants[end] = tenant

    def close(self, end: Callable[[], object]) -> None:
        del self._tenants[end]

    def end(self) -> None:
        for end in list(self._tenants):
            end()


class ServedState(ABC):
    """What is behind an application, the service of a server or the front of a fleet: its keys, and its requests in progress.

    Attributes:
        draining: whether new requests are refused.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.draining = options, False
        self.keys = Keys(options.key_rules())
        self.limits = KeyLimits(self.keys.rules, time.monotonic)
        self._busy, self._idle = 0, asyncio.Event()
        self._trimming: asyncio.TimerHandle | None = None  # trims the heap when no request is in progress

    @abstractmethod
    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and return when those in progress have ended; after `timeout_s` they are aborted."""

    async def prepare[T](self, request: Request, work: Callable[[], T], number: int = 0, num_bytes: int = 0) -> T:
        """The result of slow work, done in a thread."""
        return await asyncio.to_thread(work)

    def request_started(self) -> None:
        """Count an HTTP request in progress. On the event loop."""
        self._busy += 1
        self._idle.clear()
        if self._trimming is not None:
            self._trimming.cancel()

    def request_ended(self) -> None:
        """Uncount an HTTP request that has ended."""
        self._busy -= 1
        if not self._busy:
            self._idle.set()
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(_IDLE_S, lambda: loop.run_in_executor(None, trim_heap))

    async def until_idle(self, timeout_s: float) -> None:
        """Return when no request is in progress, or the time is over."""
        if self._busy:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def watch_key_file(self) -> None:
        """Follow the file of `--api-key-file` until cancelled; returns at once if there is none."""
        path, last_error = self.options.api_key_file, ""
        while path is not None:
            try:
                rules = await asyncio.to_thread(self.options.key_rules)
            except ConfigError as error:  # its text has no secrets
                if str(error) != last_error:
                    last_error = str(error)
                    log.error("the changed file of API keys is not used, the old rules hold: %s: %s", path, error)
            else:
                last_error = ""
                self.limits.forget(rules.__contains__)
                if changed := self.keys.replace(rules):
                    log.info("the file of API keys was read again: %s", changed)
            await asyncio.sleep(POLL_S)
