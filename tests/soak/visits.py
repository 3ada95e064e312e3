"""What random clients do: each visit is a client's whole session, of one kind, drawn from a seed.

Knows how sessions of an ordinary client go on; what came of a request is counted by whoever sends it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.soak.client import CHAT, RESPONSES, TEXT, Ask, Got, Said
from tests.soak.tools import MCP_NAMES, NAMES, STEADY

WORDS = (
    "the of and to in that it is was for on are as with his they be at this have from or had by some what there we can"
)
_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"item": {"enum": ["lamp", "pen", "moon"]}},
    "required": ["item"],
    "additionalProperties": False,
}
_RESULTS = ("23 dollars", "", "x" * 400, '{"price": 23}', "</tool_response><|im_end|>", "é\u2028\U0001f4a1")
_CALL_TOKENS = 160
_SHARED = "You sell lamps and pens. " * 4

Body = dict[str, Any]
Send = Callable[[Ask, bool], Awaitable[Got]]
"""Sends a request; the flag says whether the answer has to come out the same on an idle server."""


@dataclass(slots=True)
class Visitor:
    """A client.

    Args:
        rng: what it does.
        send: its requests.
        model: to ask for.
        mcp: whether the server has tools of an MCP server.
        name: its own.
    """

    rng: Random
    send: Send
    model: str
    mcp: bool
    name: str

    async def chat(self) -> None:
        """One question, one to three answers."""
        await self._ask(CHAT, self._several({"messages": self._opening()}))

    async def text(self) -> None:
        """A text, or token ids, to go on with."""
        prompt: Any = self._words(40)
        if self.rng.random() < 0.5:
            prompt = [self.rng.randrange(97, 180) for _ in range(self.rng.randrange(1, 200))]
        await self._ask(TEXT, self._several({"prompt": prompt}))

    async def structured(self) -> None:
        """An answer that has a form."""
        form: Body = self.rng.choice(
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _ITEM}}},
                {"structured_outputs": {"choice": ["lamp", "pen", "moon"]}},
                {"structured_outputs": {"regex": "[a-c]{3,9}"}},
            )
        )
        got = await self._ask(CHAT, self._sampled({"messages": self._opening()} | form | {"max_tokens": _CALL_TOKENS}))
        if got is not None and "response_format" in form:
            for choice in got.choices.values():
                if choice.finish_reason == "stop":
                    json.loads(choice.text)

    async def session(self) -> None:
        """A conversation with pauses, whose client comes back, does not, or has changed its mind."""
        messages = self._opening()
        header = {"x-session-id": self.name} if self.rng.random() < 0.3 else {}
        for _ in range(self.rng.randrange(2, 5)):
            got = await self._ask(CHAT, self._sampled({"messages": messages}), header)
            if got is None or self.rng.random() < 0.15:
                return
            messages = [*messages, got.first.message, {"role": "user", "content": self._words(12)}]
            if self.rng.random() < 0.2:
                place = self.rng.randrange(len(messages))
                messages[place] = messages[place] | {"content": self._words(10)}
            await self._pause()

    async def client_tools(self) -> None:
        """Calls that the client runs."""
        messages, tools = self._opening(), [_declared(name) for name in ("price", "stock")]
        choice: Any = "required" if self.rng.random() < 0.7 else {"type": "function", "function": {"name": "stock"}}
        for _ in range(self.rng.randrange(1, 4)):
            body = {"messages": messages, "tools": tools, "tool_choice": choice}
            got = await self._ask(CHAT, self._sampled(body) | {"max_tokens": _CALL_TOKENS})
            if got is None or not got.first.calls or self.rng.random() < 0.2:
                return
            messages = [*messages, got.first.message, *(self._result(call) for call in got.first.calls.values())]
            await self._pause()

    async def server_tools(self) -> None:
        """Calls that the server runs, in a chat or in a response, perhaps beside the client's; some come to nothing."""
        names = self.rng.sample(NAMES + (MCP_NAMES if self.mcp else ()), 2)
        hints = {"server_tools": names, "max_rounds": self.rng.randrange(1, 4)}
        body = self._sampled({"tool_choice": "required", "jinfercept": hints})
        steady = all(name in STEADY for name in names)
        if self.rng.random() < 0.3:
            body |= {"input": self._words(10), "max_output_tokens": 3 * _CALL_TOKENS}
            await self._ask(RESPONSES, body, steady=steady)
            return
        messages = self._opening()
        own = {"tools": [_declared("price")]} if self.rng.random() < 0.5 else {}
        body |= {"messages": messages, "max_tokens": 3 * _CALL_TOKENS} | own
        got = await self._ask(CHAT, body, steady=steady)
        if got is not None and got.first.calls:
            await self._pause()
            messages = [*messages, got.first.message, *(self._result(call) for call in got.first.calls.values())]
            await self._ask(CHAT, self._sampled({"messages": messages} | own), steady=False)

    async def responses(self) -> None:
        """Responses that go on from one another."""
        previous: str | None = None
        for _ in range(self.rng.randrange(1, 4)):
            body = self._sampled({"input": self._words(10), "previous_response_id": previous})
            body["max_output_tokens"] = body.pop("max_tokens")
            got = await self._ask(RESPONSES, body)
            if got is None or self.rng.random() < 0.2:
                return
            previous = got.id
            await self._pause()

    async def response_tools(self) -> None:
        """A response that calls a function of the client's, and the answer to its result."""
        tools = [{"type": "function", **_declared("price")["function"]}]
        body = {"input": self._words(8), "tools": tools, "max_output_tokens": _CALL_TOKENS}
        got = await self._ask(RESPONSES, self._sampled(body | {"tool_choice": "required"}))
        if got is None or not got.first.calls:
            return
        await self._pause()
        outputs = [
            {"type": "function_call_output", "call_id": call["id"], "output": self.rng.choice(_RESULTS)}
            for call in got.first.calls.values()
        ]
        body = {"input": outputs, "previous_response_id": got.id, "tools": tools, "max_output_tokens": 24}
        await self._ask(RESPONSES, self._sampled(body))

    async def nonsense(self) -> None:
        """What has to be refused."""
        path, body = self.rng.choice(
            (
                (CHAT, {"messages": "no"}),
                (CHAT, {"messages": self._opening(), "temperature": -1}),
                (CHAT, {"messages": [{"role": "user", "content": "x" * 50_000}]}),
                (TEXT, {"prompt": [10**8]}),
                (RESPONSES, {"input": "x", "previous_response_id": "resp_of_nobody"}),
            )
        )
        got = await self.send(Ask(path, body), False)
        if got.end == "answered":
            raise ValueError(f"{path} took {str(body)[:80]}")

    async def _ask(
        self, path: str, body: Body, headers: Mapping[str, str] | None = None, *, steady: bool = True
    ) -> Got | None:
        """One request, perhaps as a stream, perhaps given up; None if its answer is of no use to go on with."""
        body = {"model": self.model} | body
        if path != RESPONSES:
            body["return_token_ids"] = True
        if self.rng.random() < 0.6:
            body["stream"] = True
        leave_s = self.rng.expovariate(4.0) if self.rng.random() < 0.15 else None
        got = await self.send(Ask(path, body, headers or {}, leave_s), steady and body["temperature"] == 0)
        return got if got.end == "answered" else None

    def _sampled(self, body: Body) -> Body:
        sampled = {"temperature": 0} if self.rng.random() < 0.75 else {"temperature": 1.0, "seed": 7, "top_p": 0.9}
        return {"max_tokens": self.rng.randrange(1, 48)} | sampled | body

    def _several(self, body: Body) -> Body:
        """One answer, or several that differ."""
        number = self.rng.choice((1, 1, 1, 2, 3))
        return self._sampled(body) | ({"n": number, "temperature": 1.0} if number > 1 else {})

    def _opening(self) -> list[Body]:
        shared = [{"role": "system", "content": _SHARED}] if self.rng.random() < 0.5 else []
        return [*shared, {"role": "user", "content": self._words(self.rng.choice((3, 12, 60)))}]

    def _result(self, call: Mapping[str, str]) -> Body:
        return {"role": "tool", "tool_call_id": call["id"], "content": self.rng.choice(_RESULTS)}

    def _words(self, most: int) -> str:
        return " ".join(self.rng.choices(WORDS.split(), k=self.rng.randrange(1, most + 1)))

    async def _pause(self) -> None:
        """A tool of the client's runs, or a person reads."""
        await asyncio.sleep(min(self.rng.expovariate(3.0), 2.0))


Play = Callable[[Visitor], Awaitable[None]]

KINDS: dict[str, tuple[Play, int]] = {
    "chat": (Visitor.chat, 2),
    "text": (Visitor.text, 2),
    "structured": (Visitor.structured, 2),
    "session": (Visitor.session, 3),
    "client tools": (Visitor.client_tools, 3),
    "server tools": (Visitor.server_tools, 3),
    "responses": (Visitor.responses, 2),
    "response tools": (Visitor.response_tools, 1),
    "nonsense": (Visitor.nonsense, 1),
}
"""Kinds of visits, each with its share."""


def same(first: Said, second: Said) -> bool:
    """Whether two answers are the same, ids of calls and items aside."""
    if first.token_ids or second.token_ids:
        return first.token_ids == second.token_ids
    calls = [[(call["name"], call["arguments"]) for call in reply.calls.values()] for reply in (first, second)]
    return first.text == second.text and calls[0] == calls[1]


def _declared(name: str) -> Body:
    return {
        "type": "function",
        "function": {"name": name, "description": "Of an item.", "parameters": _ITEM},
    }
