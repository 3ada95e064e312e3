"""A client that may go away at any moment: one request, and how it ended. What should not happen is part of the answer.

Reads chat completions, completions and responses, whole or as events; httpx2 comes with the extra `bench`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

End = Literal["answered", "left", "refused", "lost", "hung"]
"""How a request ended: `left` by us, `refused` by the server with a status of 4xx, the last two are its failures."""

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_TERMINAL = ("response.completed", "response.incomplete", "response.failed")
_SHOWN = 300


class Ask(NamedTuple):
    """A request.

    Attributes:
        leave_s: seconds after which its client goes away; None: it stays.
    """

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = {}
    leave_s: float | None = None


@dataclass(slots=True)
class Said:
    """One of `n` answers.

    Attributes:
        calls: by their place among the calls; each has `id`, `name` and `arguments`.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """As a chat goes on from it."""
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in self.calls.values()
        ]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


@dataclass(slots=True)
class Got:
    """What came of a request.

    Attributes:
        status: of HTTP; 0 if none came.
        id: of a response.
        choices: by index.
        prompt_ids: of a chat.
    """

    end: End = "lost"
    detail: str = ""
    status: int = 0
    id: str = ""
    choices: dict[int, Said] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def first(self) -> Said:
        """The first answer."""
        return self.choices[min(self.choices)]


class _Broken(Exception):
    """The server did what it must not do."""


async def send(http: "AsyncClient", ask: Ask, patience_s: float) -> Got:
    """Send a request and read what comes.

    Args:
        patience_s: seconds without a byte after which the request counts as hung.
    """
    from httpx2 import HTTPError

    got, leaving = Got(), asyncio.timeout(ask.leave_s)
    try:
        async with leaving:
            await _exchange(http, ask, patience_s, got)
    except TimeoutError:
        got.end = "left" if leaving.expired() else "hung"
        got.detail = got.detail or f"nothing came for {patience_s:g} s"
    except HTTPError as error:
        got.detail = f"the connection broke: {type(error).__name__} {error}"
    except _Broken as error:
        got.detail = str(error)[:_SHOWN]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        got.detail = f"the answer makes no sense: {type(error).__name__} {error}"[:_SHOWN]
    return got


async def _exchange(http: "AsyncClient", ask: Ask, patience_s: float, got: Got) -> None:
    request = http.build_request("POST", ask.path, json=ask.body, headers=dict(ask.headers))
    async with asyncio.timeout(patience_s):
        response = await http.send(request, stream=True)
    try:
        got.status = response.status_code
        if response.status_code != 200:
            async with asyncio.timeout(patience_s):
                text = (await response.aread()).decode(errors="replace")
            got.end = "refused" if 400 <= response.status_code < 500 else "lost"
            got.detail = f"HTTP {response.status_code}: {text}"[:_SHOWN]
        elif ask.body.get("stream"):
            await _read_events(response, patience_s, got)
        else:
            async with asyncio.timeout(patience_s):
                _take_whole(json.loads(await response.aread()), got)
    finally:
        await response.aclose()


async def _read_events(response: "Response", patience_s: float, got: Got) -> None:
    ended = False
    async for name, choice in _events(response, patience_s):
        if choice == "[DONE]":
            ended = True
            break
        data = json.loads(choice)
        if data.get("error") and not name.startswith("response."):
            raise _Broken(f"an error in the stream: {data['error']}")
        if name in _TERMINAL:
            _take_whole(data["response"], got)
            ended = True
        elif not name:
            _take_chunk(data, got)
    if not ended:
        raise _Broken("the stream ended before its end")
    if any(choice.finish_reason is None for choice in got.choices.values()) or not got.choices:
        raise _Broken("the stream has no finish reason")
    got.end = "answered"


async def _events(response: "Response", patience_s: float) -> AsyncIterator[tuple[str, str]]:
    """Name and data of every event."""
    lines, name = response.aiter_lines(), ""
    while True:
        try:
            async with asyncio.timeout(patience_s):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, line[5:].strip()
        elif not line:
            name = ""


def _take_whole(answer: Mapping[str, Any], got: Got) -> None:
    """A whole answer of any of the three."""
    if answer["object"] == "response":
        if answer["status"] not in ("completed", "incomplete"):
            raise _Broken(f"the response is {answer['status']}: {answer['error']}")
        reply, got.id = got.choices.setdefault(0, Said()), answer["id"]
        reply.finish_reason = answer["status"]
        for item in answer["output"]:
            if item["type"] == "function_call":
                call = {"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]}
                reply.calls[len(reply.calls)] = call
            elif item["type"] == "message":
                reply.text += "".join(part["text"] for part in item["content"])
                reply.logprobs += [logprob for part in item["content"] for logprob in part.get("logprobs") or ()]
    else:
        got.prompt_ids = answer.get("prompt_token_ids") or got.prompt_ids
        for choice in answer["choices"]:
            _take_choice(choice, choice.get("message") or choice, got)
    if not all(reply.finish_reason for reply in got.choices.values()):
        raise _Broken("an answer has no finish reason")
    got.end = "answered"


def _take_chunk(chunk: Mapping[str, Any], got: Got) -> None:
    got.prompt_ids = chunk.get("prompt_token_ids") or got.prompt_ids
    for choice in chunk["choices"]:
        _take_choice(choice, choice.get("delta") or choice, got)


def _take_choice(choice: Mapping[str, Any], part: Mapping[str, Any], got: Got) -> None:
    """A choice, or a piece of one: `part` is its message, its delta or itself."""
    reply = got.choices.setdefault(choice.get("index", 0), Said())
    if reply.finish_reason is not None and part.get("content"):
        raise _Broken("there is more after the end")
    reply.text += part.get("content") or part.get("text") or ""
    reply.token_ids += choice.get("token_ids") or []
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    reported = choice.get("logprobs") or {}
    reply.logprobs += reported.get("content") or reported.get("top_logprobs") or []
    for place, call in enumerate(part.get("tool_calls") or ()):
        joined = reply.calls.setdefault(call.get("index", place), {"id": "", "name": "", "arguments": ""})
        joined["id"] += call.get("id") or ""
        joined["name"] += call["function"].get("name") or ""
        joined["arguments"] += call["function"].get("arguments") or ""
