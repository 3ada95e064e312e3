"""Attacks of a hostile client, with an API key of its own and without one.

Every attack is one that has hurt a server: floods, bombs, bodies that a lenient parser takes for several requests. What an
attack gets does not matter, as long as it gets something: the server fails it if it answers 5xx (but 503) or not at all.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_LEAVE_S = 2.0
_LONG: Mapping[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1}
_MIB = 2**20


class Answer(NamedTuple):
    """The begin of what a server answers: its status, 0 if it closed the connection; `left` if the client did."""

    status: int
    left: bool = False


class Attacker(NamedTuple):
    """One hostile client.

    Attributes:
        host, port: of the server.
        key: its API key.
        model: to ask for.
        patience_s: seconds without a byte after which the server counts as hung.
        rng: of what it does.
    """

    host: str
    port: int
    key: str
    model: str
    patience_s: float
    rng: Random

    async def flood(self) -> Answer:
        """32 long answers, as urgent as can be; the client leaves halfway."""
        most: Mapping[str, Any] = {"n": 32, "priority": -(2**31), "stream": True}
        return await self._post(TEXT, {"prompt": self._words(8), **_LONG, **most}, leave_s=_LEAVE_S)

    async def giants(self) -> Answer:
        """Prompts that fill the context, one token each."""
        return await self._post(TEXT, {"prompt": [self._words(200) for _ in range(32)], "max_tokens": 1})

    async def large_text(self) -> Answer:
        """A text of megabytes to tokenise, by a client that does not wait."""
        return await self._post("/tokenize", {"prompt": "ab" * _MIB}, leave_s=0.3)

    async def large_chat(self) -> Answer:
        """Megabytes where a conversation has text: an assistant's message, a tool's name, a template's argument."""
        assistant = {"role": "assistant", "content": "ab" * _MIB}
        fields: Mapping[str, Any] = self.rng.choice(
            (
                {"messages": [assistant, {"role": "user", "content": "?"}]},
                {"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": {"self": 1, "x": "a" * _MIB}},
                {"messages": [{"role": "user", "content": "?"}] * 16384},
                {"messages": [{"role": "user", "content": "?"}], "bad_words": ["ab" * 1000] * 1024},
            )
        )
        return await self._post(CHAT, {"max_tokens": 1} | fields)

    async def bomb(self) -> Answer:
        """A list in which everything is wrong."""
        number = self.rng.choice((1000, 600_000))
        fields: Mapping[str, Any] = self.rng.choice(
            (
                {"prompt": [{}] * number},
                {"prompt": "x", "allowed_token_ids": ["x"] * number},
                {"prompt": "x", "logit_bias": {str(place): "x" for place in range(number // 4)}},
                {"prompt": [[1]] * number},
            )
        )
        return await self._post(TEXT, fields)

    async def references(self) -> Answer:
        """Thousands of references to one stored item."""
        item = {"type": "reasoning", "id": "rs_mine", "summary": []}
        await self._post(RESPONSES, {"input": [item, {"role": "user", "content": "?"}], "max_output_tokens": 1})
        return await self._post(RESPONSES, {"input": [{"type": "item_reference", "id": "rs_mine"}] * 4000})

    async def hoard(self) -> Answer:
        """A large response that is stored, in the background if the server lets it."""
        body = {"input": self._words(100), "max_output_tokens": 4, "metadata": {"x": "y" * 500}}
        return await self._post(RESPONSES, body | {"background": self.rng.random() < 0.5})

    async def grammars(self) -> Answer:
        """Forms of an answer that cost much to compile, or that make no sense."""
        form: Mapping[str, Any] = self.rng.choice(
            (
                {"regex": "(a|b|ab){1,500}" * 20},
                {"regex": "[a-z]{1,100000}"},
                {"grammar": "start: start start | /a/"},
                {"grammar": "start: /(/"},
                {"choice": [f"{place:050}" for place in range(4096)]},
                {"json": {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(3000)}}},
                {"json": {"$ref": "#"}},
            )
        )
        return await self._post(TEXT, {"prompt": "x", "max_tokens": 2, "structured_outputs": form})

    async def names(self) -> Answer:
        """Tools and sessions under names that nobody has seen before."""
        tool = {"name": f"t{self.rng.randrange(10**9)}", "parameters": {"type": "object", "properties": {}}}
        messages = [{"role": "user", "content": self._words(5)}]
        body = {"messages": messages, "tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        return await self._post(CHAT, body | {"max_tokens": 24, "session_id": str(self.rng.random())})

    async def smuggle(self) -> Answer:
        """A body that a lenient parser takes for another request, without a key and with one."""
        inner = b"\r\nupgrade: h2c" * 40 + b"\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(inner)}\r\nConnection: Upgrade\r\n"
        head += self.rng.choice(("", self._bearer())) + "Upgrade: h2c\r\n\r\n"
        return await self._raw(head.encode() + inner, leave_s=0.5)

    async def dawdle(self) -> Answer:
        """Connections that send half of a head, and wait."""
        opened = [await asyncio.open_connection(self.host, self.port) for _ in range(20)]
        try:
            for _, writer in opened:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")
            await asyncio.sleep(0.5)
        finally:
            for _, writer in opened:
                writer.transport.abort()
        return Answer(0, left=True)

    async def look(self) -> Answer:
        """What there is to see, without a key."""
        path = self.rng.choice(("/metrics", "/live", "/openapi.json", "/v1/models", "/inbox", "/"))
        return await self._raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())

    def _words(self, number: int) -> str:
        return " ".join(f"{self.rng.randrange(10**6)}" for _ in range(number))

    def _bearer(self) -> str:
        return f"Authorization: Bearer {self.key}\r\n"

    async def _post(self, path: str, fields: Mapping[str, Any], leave_s: float | None = None) -> Answer:
        body = json.dumps({"model": self.model} | dict(fields)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{self._bearer()}Content-Type: application/json\r\n"
        return await self._raw(
            f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body, leave_s
        )

    async def _raw(self, sent: bytes, leave_s: float | None = None) -> Answer:
        """Send bytes and read the answer to its end, or until the client leaves."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        leaving = asyncio.timeout(leave_s)
        answered = b""
        try:
            async with leaving:
                writer.write(sent)
                with suppress(ConnectionError):
                    while piece := await asyncio.wait_for(reader.read(_MIB), self.patience_s):
                        answered = answered or piece
        except TimeoutError:
            if not leaving.expired():
                raise
        finally:
            writer.transport.abort()
        status = answered[9:12]
        return Answer(int(status) if status.isdigit() else 0, leaving.expired())


ATTACKS: Mapping[str, Callable[[Attacker], Coroutine[Any, Any, Answer]]] = {
    "flood": Attacker.flood,
    "giants": Attacker.giants,
    "large text": Attacker.large_text,
    "large chat": Attacker.large_chat,
    "bomb": Attacker.bomb,
    "references": Attacker.references,
    "hoard": Attacker.hoard,
    "grammars": Attacker.grammars,
    "names": Attacker.names,
    "smuggle": Attacker.smuggle,
    "dawdle": Attacker.dawdle,
    "look": Attacker.look,
}
