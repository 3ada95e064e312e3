"""A server that speaks OpenAI's protocol without a model, in a thread: it answers words, or fails as a request's model says."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
REFUSALS = {
    "busy": (b"429 Too Many Requests", b'{"error": {"message": "come again"}}'),
    "broken": (b"500 Internal Server Error", b"<html>no"),
    "whole": (b"200 OK", b'{"choices": []}'),
}
ODD = {
    "odd": b"data: {no\n\n",
    "list": b"data: [1]\n\n",
    "failing": b'data: {"error": {"message": "it broke"}}\n\n',
}


@dataclass
class FakeServer:
    """What it was asked.

    Attributes:
        url: without a version.
        meet: requests that have to run at a time before the first of them is answered.
        bodies, sessions: of every request, and the session that its header names.
        most: requests that ever ran at a time.
    """

    url: str = ""
    meet: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    most: int = 0
    _running: int = 0
    _known: list[Sequence[Any]] = field(default_factory=list)
    _have_met: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                payload = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith("get"):
                    _send_whole(writer, b"200 OK", b'{"data": [{"id": "good"}]}')
                    continue
                body = json.loads(payload)
                self.bodies.append(body)
                self.sessions.append(headers.get("x-session-id", ""))
                self._running += 1
                self.most = max(self.most, self._running)
                if self.most >= self.meet:
                    self._have_met.set()
                try:
                    await self._have_met.wait()
                    await self._answer(body, writer)
                finally:
                    self._running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body.get("prompt") or " ".join(f"{m['role']} {m['content']}" for m in body["messages"]).split()
        cached = max((_common(prompt, earlier) for earlier in self._known), default=0)
        self._known.append(prompt)
        model = body["model"]
        if model in REFUSALS:
            _send_whole(writer, *REFUSALS[model])
            return
        if model == "silent":
            await asyncio.sleep(60)
        if model == "gone":
            raise ConnectionError
        writer.write(HEAD)
        if model in ("cut", "stopped"):
            _send(writer, {"choices": [{"delta": {"content": "be"}}]})
            await writer.drain()
        if model == "cut":
            raise ConnectionError
        if model == "stopped":
            writer.write(END)
            return
        while model == "trickling":
            _send(writer, {"choices": [{"delta": {"content": "a "}}]})
            await asyncio.sleep(0.01)
        if model in ODD:
            _send_bytes(writer, ODD[model])
        for number in range(body["max_tokens"]):
            choice = (
                {"delta": {"content": f"so{number} "}} if "messages" in body else {"text": "so", "token_ids": [number]}
            )
            _send(writer, {"choices": [choice]})
            await writer.drain()
        _send(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        if body["model"] != "uncounted":
            usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
            _send(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
        _send_bytes(writer, b"data: [DONE]\n\n")
        if body["model"] != "lingering":
            writer.write(END)


@contextmanager
def fake_openai(**options: Any) -> Iterator[FakeServer]:
    """Serve at a port that is free."""
    fake, loop, ready = FakeServer(**options), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of what both begin with."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _send(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    _send_bytes(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _send_bytes(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _send_whole(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
