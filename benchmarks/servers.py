"""Servers in processes of their own, started and ended around a measurement or a test, and completions that they stream.

A reply has the time of its first tokens, its usage, or its error.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

from jinfercept.errors import ConfigError

_POLL_S = 0.05
_END_S = 20.0
"""Seconds that the server may take to drain after SIGTERM."""
NO_FIELDS: Mapping[str, Any] = {}
_KEY_VARIABLE = "JINFERCEPT_API_KEY"


class Child(NamedTuple):
    """A serving child process.

    Attributes:
        url: without a version.
        process: the child; its context manager ends it.
        log: file with its output.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


@contextmanager
def child_server(model: str, flags: Mapping[str, Any]) -> Iterator[str]:
    """Starts a server as `child_process` does, and gives its URL only."""
    with child_process(model, flags) as child:
        yield child.url


@contextmanager
def child_process(model: str, flags: Mapping[str, Any]) -> Iterator[Child]:
    """Start a server, and end it on leaving.

    Args:
        model: as for `LLM`.
        flags: options of `LLM` and of the server.

    Raises:
        ConfigError: the process ends before it serves.
    """
    command = [sys.executable, "-m", "jinfercept", "serve", model, "--port", "0", *_arguments(flags)]
    environment = {name: value for name, value in os.environ.items() if name != _KEY_VARIABLE}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
            )
        try:
            with _ended_by_sigterm():
                yield Child(_wait(child, log, command), child, log)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)  # the server drains
                try:
                    child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    child.kill()
            child.wait()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process as an exception does, so that it leaves no server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    """Options of `LLM` as flags."""
    arguments = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _wait(child: "subprocess.Popen[bytes]", log: Path, command: list[str]) -> str:
    """The URL, once the server accepts connections."""
    while child.poll() is None:
        if announced := re.search(r"^jinfercept: (http\S+)$", log.read_text(errors="replace"), re.MULTILINE):
            parts = urlsplit(announced[1])
            try:
                socket.create_connection((str(parts.hostname), parts.port or 80), timeout=1.0).close()
            except OSError:
                pass
            else:
                return announced[1]
        time.sleep(_POLL_S)
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    raise ConfigError("the server did not start", got=last or "nothing said", fix=f"try {shlex.join(command)}")


class Target(NamedTuple):
    """A server.

    Attributes:
        url: with the version at its end, as OpenAI's clients take it: `http://127.0.0.1:8000/v1`.
        timeout_s: seconds that a request may wait for its server.
    """

    name: str
    url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    def client(self) -> AsyncOpenAI:
        """A client with connections of its own, which belongs to one event loop."""
        return AsyncOpenAI(base_url=self.url, api_key=self.api_key or "none", timeout=self.timeout_s, max_retries=0)


@dataclass(slots=True)
class Reply:
    """The reply to one request. Times are seconds of `time.perf_counter`.

    Attributes:
        first_s: seconds to the first tokens; None: there are none.
        prompt_tokens, completion_tokens, cached_tokens: of the usage; None: the server does not count them.
        error: kind of failure, in a word or two; None: the request succeeded.
    """

    sent_s: float
    first_s: float | None = None
    end_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


def make_target(text: str, api_key: str | None, timeout_s: float) -> Target:
    """A server given as `URL` or `NAME=URL`; `/v1` is added where no version ends it.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    name, _, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError("--base-url is not a URL", got=text, fix="for example http://127.0.0.1:8000/v1")
    url, last = url.rstrip("/"), parts.path.rstrip("/").rpartition("/")[2]
    if not (last.startswith("v") and last[1:].isdigit()):
        url += "/v1"
    return Target(name or parts.netloc, url, api_key, timeout_s)


async def complete(
    client: AsyncOpenAI, model: str, prompt: list[int], new_tokens: int, fields: Mapping[str, Any] = NO_FIELDS
) -> Reply:
    """Complete a prompt greedily with so many tokens, and with further fields of the body. A failure is a reply."""
    reply, extra = Reply(time.perf_counter()), {"ignore_eos": True, "return_token_ids": True, **fields}
    finished = False
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        async for chunk in stream:
            if chunk.usage is not None:
                reply.prompt_tokens, reply.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                reply.cached_tokens = None if details is None else details.cached_tokens
            for choice in chunk.choices:
                token_ids: list[Any] = getattr(choice, "token_ids", None) or []
                reply.token_ids += token_ids
                finished |= choice.finish_reason is not None
                if reply.first_s is None and (choice.text or token_ids):
                    reply.first_s = time.perf_counter() - reply.sent_s
    except APIStatusError as error:
        reply.error = f"HTTP {error.status_code}"
    except APIConnectionError as error:
        reply.error = type(error).__name__
    except APIError as error:
        reply.error = error.message
    else:
        reply.error = None if finished else "the stream ended early"
    reply.end_s = time.perf_counter()
    return reply
