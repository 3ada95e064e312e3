"""A server that speaks OpenAI's protocol without a model, in a thread: it answers words, or fails as a request's model says."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            await _answer(json.loads(await reader.readexactly(int(headers.get("content-length", 0)))), writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
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
    if model in ODD:
        _send_bytes(writer, ODD[model])
    for number in range(body["max_tokens"]):
        _send(writer, {"choices": [{"delta": {"content": f"so{number} "}}]})
        await writer.drain()
    _send(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
    usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
    _send(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}})
    _send_bytes(writer, b"data: [DONE]\n\n")
    writer.write(END)


@contextmanager
def fake_openai() -> Iterator[str]:
    """Serve at a port that is free; gives the URL without a version."""
    urls, loop, ready = list[str](), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await stop.wait()
        server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _send(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    _send_bytes(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _send_bytes(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _send_whole(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
