"""Server-sent events: a response that sends events as they are generated, and ends when its client disconnects.

`sse-starlette` is not used: it cancels the clean-up of a generator again at each await, and never closes a generator that has
not started, so requests would keep their pages. It also pings busy streams, patches uvicorn's shutdown for the whole process,
and takes three times as long per event.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jinfercept.serve.http.access_log import DETAILS
from jinfercept.serve.http.request_body import unless_disconnected
from jinfercept.serve.protocols.encoding import OPENAI, StreamFormat
from jinfercept.serve.protocols.errors import ApiError

KEEP_ALIVE_S = 15.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@final
class EventStream(Response):
    """Sends the events of a generator, which is closed when the client disconnects. Its exception becomes the last event.

    Args:
        close: called at the end, even if the client disconnects before the first event is generated.
        keep_alive_s: seconds without an event after which `form.keep_alive` is sent, so that proxies keep the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]] | None = None,
        form: StreamFormat = OPENAI,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._close, self._form, self._keep_alive_s = events, close, form, keep_alive_s
        self._written_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        except ApiError:  # the events' own errors are events
            scope[DETAILS]["disconnected"] = True
        finally:
            if self._close is not None:
                await self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        self._written_s = loop.time()
        alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            async for data in self._events:
                self._written_s = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            last = self._form.failed(ApiError.failed(error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            alive.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._written_s + self._keep_alive_s - loop.time())
            if loop.time() >= self._written_s + self._keep_alive_s:
                self._written_s = loop.time()
                await send({"type": "http.response.body", "body": self._form.keep_alive, "more_body": True})
