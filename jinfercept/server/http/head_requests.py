"""ASGI middleware that answers HEAD as GET is answered, without the body, on all routes that have GET."""

from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@final
class HeadRequests:
    """ASGI middleware around an application that knows no HEAD.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The client of a stream has its end at once, so that the application sees it disconnect."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
