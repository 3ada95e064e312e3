"""`/mcp`: the model as a server of the Model Context Protocol, over streamable HTTP without sessions.

Its tools make responses as `/v1/responses` does, so keys, limits, storage and the drain are the same. A task is a response that
is generated in the background, and is read by the key that began it only.
"""

import asyncio
import json
import re
from contextlib import suppress
from inspect import getdoc
from typing import Annotated, Any

from fastapi import APIRouter, Request
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import written_text
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.routes.guarded_route import SMALL_BYTES, GuardedRoute, validated
from jinfercept.serve.routes.responses import create_response
from jinfercept.serve.service import BODY_BYTES, service_of, tenant_of
from jinfercept.version import __version__

_LONGEST_WAIT_S = 30.0
"""Less than the minute after which clients of the protocol give up on a call."""
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_INSTRUCTIONS = (
    "Asks a language model. `ask` returns its answer; for long work use `start_task`, and `task_answer` with its id."
)


class _ToolArguments(BaseModel):
    """Arguments of a tool, whose description is the docstring."""

    model_config = ConfigDict(extra="forbid")


class _Ask(_ToolArguments):
    """Ask the language model, and return its answer when it is complete."""

    prompt: Annotated[str, Field(description="what the model reads; it knows nothing of earlier calls")]
    system: Annotated[str | None, Field(description="the system message")] = None
    max_tokens: Annotated[int, Field(ge=1, description="limit of the answer's tokens")] = 2048
    use_tools: Annotated[bool, Field(description="whether the model may call the tools of its server")] = False


class _StartTask(_Ask):
    """Hand the language model a task, which it works on after this call has returned. The result has the task's id and its
    status: queued, in_progress, completed, incomplete if the answer was cut off, or cancelled."""


class _TaskAnswer(_ToolArguments):
    """The answer of a task, as far as it is written; call it again while its status is queued or in_progress."""

    task_id: Annotated[str, Field(max_length=256, description="the id that start_task returned")]
    wait_s: Annotated[float, Field(ge=0, le=_LONGEST_WAIT_S, description="seconds to wait for the end")] = 0.0


_TOOLS = {"ask": _Ask, "start_task": _StartTask, "task_answer": _TaskAnswer}


async def _list_tools(context: Any, params: Any) -> ListToolsResult:
    return ListToolsResult(
        tools=[
            Tool(name=name, description=getdoc(arguments), input_schema=arguments.model_json_schema())
            for name, arguments in _TOOLS.items()
        ]
    )


async def _call_tool(context: Any, params: Any) -> CallToolResult:
    """The result of a call; every mistake of the client and every failure of the response is a result too."""
    name, request = params.name, context.request
    try:
        if name not in _TOOLS:
            raise ApiError.bad(f"no tool is named {name[:80]!r}; fix: one of {', '.join(_TOOLS)}")
        arguments = validated(params.arguments or {}, TypeAdapter[Any](_TOOLS[name]))
        if name == "task_answer":
            stored = await service_of(request).state.find(arguments.task_id, tenant_of(request))
            if stored.background is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stored.background.ended(), arguments.wait_s)
            return _result(stored.response)
        body = ResponsesBody.model_validate(
            {
                "input": arguments.prompt,
                "instructions": arguments.system,
                "max_output_tokens": arguments.max_tokens,
                "jinfercept": {"server_tools": arguments.use_tools},
                "store": name != "ask",
                "background": name != "ask",
            }
        )
        response = json.loads(bytes((await create_response(body, request)).body))
        return _result(response, answer_only=name == "ask")
    except ApiError as error:
        return CallToolResult(content=[TextContent(text=error.detail)], is_error=True)


def _result(response: dict[str, Any], answer_only: bool = False) -> CallToolResult:
    """A response as the result of a tool: its text, or a task. Raises `ApiError` for a response that failed."""
    if response["error"]:
        raise ApiError(500, response["error"]["message"])
    answer = written_text(response)
    if answer_only:
        cut = ["[cut off at max_tokens]"] if response["status"] == "incomplete" else []
        return CallToolResult(content=[TextContent(text=text) for text in (answer, *cut)])
    task = {"id": response["id"], "status": response["status"], "answer": answer}
    return CallToolResult(content=[TextContent(text=json.dumps(task))], structured_content=task)


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
    manager = StreamableHTTPSessionManager(
        Server(
            "jinfercept",
            version=__version__,
            instructions=_INSTRUCTIONS,
            on_list_tools=_list_tools,
            on_call_tool=_call_tool,
        ),
        json_response=True,
        stateless=True,
        max_request_body_size=max_body_size,
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # `HostCheck` does that
    )
    router = APIRouter(route_class=GuardedRoute, include_in_schema=False, lifespan=lambda _: manager.run())

    @router.post("/mcp")
    async def handle(request: Request) -> Response:
        body = await request.body()
        if len(_TEXTS.sub(b"", body, SMALL_BYTES)) > SMALL_BYTES:  # the SDK parses it on the event loop
            raise ApiError.bad("the message has too many values; fix: only the texts of a call may be long")
        request.scope[BODY_BYTES] = len(body)
        return _McpResponse(manager, body)

    return router
