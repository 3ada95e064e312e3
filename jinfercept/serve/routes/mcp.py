"""`/mcp`: the model as a server of the Model Context Protocol, over streamable HTTP without sessions.

Its tools make responses as `/v1/responses` does, so keys, limits, storage and the drain are the same. A task is a response that
is generated in the background, and is read by the key that began it only.
"""

import asyncio
import json
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Request
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.routes.guarded_route import GuardedRoute
from jinfercept.serve.routes.responses import create_response
from jinfercept.serve.service import BODY_BYTES, service_of, tenant_of
from jinfercept.version import __version__

_LONGEST_WAIT_S = 30.0
"""Less than the minute after which clients of the protocol give up on a call."""
_INSTRUCTIONS = (
    "Asks a language model. `ask` returns its answer; for long work use `start_task`, and `task_answer` with its id."
)

_Prompt = Annotated[str, Field(description="what the model reads; it knows nothing of earlier calls")]
_System = Annotated[str | None, Field(description="the system message")]
_MaxTokens = Annotated[int | None, Field(ge=1, description="limit of the answer's tokens")]
_UseTools = Annotated[bool, Field(description="whether the model may call the tools of its server")]


class Task(BaseModel):
    """A task.

    Attributes:
        status: `queued`, `in_progress`, `completed`, `incomplete` if the answer was cut off, or `cancelled`.
        answer: so far.
    """

    id: str
    status: str
    answer: str


async def ask(
    prompt: _Prompt,
    context: Context,
    system: _System = None,
    max_tokens: _MaxTokens = None,
    use_tools: _UseTools = False,
) -> str:
    """Ask the language model, and return its answer when it is complete."""
    body = {"input": prompt, "instructions": system, "max_output_tokens": max_tokens, "store": False}
    return _task(await _created(body, use_tools, context)).answer


async def start_task(
    prompt: _Prompt,
    context: Context,
    system: _System = None,
    max_tokens: _MaxTokens = None,
    use_tools: _UseTools = False,
) -> Task:
    """Hand the language model a task, which it works on after this call has returned; `task_answer` returns its answer."""
    body = {"input": prompt, "instructions": system, "max_output_tokens": max_tokens, "background": True}
    return _task(await _created(body, use_tools, context))


async def task_answer(
    task_id: Annotated[str, Field(max_length=256, description="the id that start_task returned")],
    context: Context,
    wait_s: Annotated[float, Field(ge=0, le=_LONGEST_WAIT_S, description="seconds to wait for the end")] = 0.0,
) -> Task:
    """The answer of a task, as far as it is written; call it again while its status is queued or in_progress."""
    request = _http(context)
    try:
        stored = await service_of(request).state.find(task_id, tenant_of(request))
    except ApiError as error:
        raise ToolError(error.detail) from error
    if stored.background is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(stored.background.ended(), wait_s)
    return _task(stored.response)


def _http(context: Context) -> Request:
    request = context.request_context.request
    assert isinstance(request, Request)
    return request


async def _created(body: dict[str, Any], use_tools: bool, context: Context) -> dict[str, Any]:
    """The response to a body of `/v1/responses`. Raises `ToolError`."""
    checked = ResponsesBody.model_validate(body | {"jinfercept": {"server_tools": use_tools}})
    try:
        response = await create_response(checked, _http(context))
    except ApiError as error:
        raise ToolError(error.detail) from error
    return json.loads(bytes(response.body))


def _task(response: dict[str, Any]) -> Task:
    """Raises `ToolError` for a response that failed."""
    if response["error"]:
        raise ToolError(response["error"]["message"])
    messages = [item for item in response["output"] if item["type"] == "message"]
    texts = [part["text"] for item in messages for part in item["content"] if part["type"] == "output_text"]
    return Task(id=response["id"], status=response["status"], answer="".join(texts))


class _McpResponse(Response):
    """The answer of the SDK to a request whose body is read."""

    def __init__(self, manager: StreamableHTTPSessionManager, body: bytes) -> None:
        super().__init__()
        self._manager, self._request_body = manager, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": self._request_body}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._manager.handle_request(scope, receive_again, send)


def mcp_router(max_body_size: int) -> APIRouter:
    """The router of the MCP server, which runs while the application of the router does.

    Args:
        max_body_size: bytes of the largest body.
    """
    server = MCPServer(
        "jinfercept",
        version=__version__,
        instructions=_INSTRUCTIONS,
        log_level="WARNING",
        subscriptions=False,  # nothing of it changes, and an open stream would hold up the drain
    )
    for function in (ask, start_task, task_answer):
        server.add_tool(function)
    server.streamable_http_app(
        json_response=True,
        stateless_http=True,
        max_request_body_size=max_body_size,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # `HostCheck` does that
    )
    manager = server.session_manager
    router = APIRouter(route_class=GuardedRoute, include_in_schema=False, lifespan=lambda _: manager.run())

    @router.post("/mcp")
    async def handle(request: Request) -> Response:
        body = await request.body()
        request.scope[BODY_BYTES] = len(body)
        return _McpResponse(manager, body)

    return router
