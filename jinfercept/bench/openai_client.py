"""A measuring OpenAI client: for each streamed request the times of its pieces, its usage, and its error.

A failed request is a result, never an exception. httpx2 comes with the extra `bench`.
"""

import asyncio
import importlib.util
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final
from urllib.parse import urlsplit

from jinfercept.errors import ConfigError

if TYPE_CHECKING:
    from httpx2 import Response

MOST_LINE_BYTES = 16 * 2**20
"""Bytes of one server-sent event; a longer one makes the reply malformed."""
_CLOSING_S = 1.0
"""Seconds that a server may take to end a response after its last event."""
_IDLE_S = 2.0
"""Seconds for which an idle connection stays open: fewer than servers allow, so that none closes it during a request."""
_SHOWN = 200
"""Characters of a server's error message that are stored."""


class Target(NamedTuple):
    """A server, and how requests reach it.

    Attributes:
        url: with the version at its end, as OpenAI's clients take it: `http://127.0.0.1:8000/v1`.
        api_key: None: none is sent.
        timeout_s: seconds of one request, from its start to its end.
    """

    name: str
    url: str
    api_key: str | None = None
    timeout_s: float = 600.0


class Ask(NamedTuple):
    """A request: path, JSON body and headers."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = {}


@dataclass(slots=True)
class ClientReply:
    """The reply to one request, filled while it streams. Times are seconds of `time.perf_counter`.

    Attributes:
        sent_s: when it was sent.
        piece_s: times of the pieces with text or tokens; of the finish reason, if there were none.
        end_s: when the answer was complete, or had failed.
        text, token_ids: of the answer; ids only where the server returns them.
        prompt_tokens, completion_tokens, cached_tokens: of the usage; None: the server does not count them.
        error: kind of failure, in a word or two; None: the request succeeded.
        detail: the failure's message.
    """

    sent_s: float
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def first_s(self) -> float | None:
        """Seconds to the first piece."""
        return self.piece_s[0] - self.sent_s if self.piece_s else None

    @property
    def seconds(self) -> float:
        """Seconds from its start to its end."""
        return self.end_s - self.sent_s


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


def check_client() -> None:
    """Raise `ConfigError` if the package that speaks HTTP is not installed."""
    if importlib.util.find_spec("httpx2") is None:
        raise ConfigError("httpx2 is not installed", got="no such package", fix="pip install 'jinfercept[bench]'")


@final
class Client:
    """Connections to one server, kept open between requests. Belongs to one event loop."""

    def __init__(self, target: Target) -> None:
        from httpx2 import AsyncClient, Limits

        self._target = target
        self._http = AsyncClient(
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            timeout=target.timeout_s,
            limits=Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
            trust_env=urlsplit(target.url).hostname not in ("127.0.0.1", "localhost", "::1"),  # no proxy to ourselves
        )

    async def model(self, name: str | None) -> str:
        """The model to ask for: the one that is wanted, or the first that the server names.

        Raises:
            ConfigError: the server does not answer, or names none.
        """
        from httpx2 import HTTPError, InvalidURL

        try:
            async with asyncio.timeout(self._target.timeout_s):
                answer = await self._http.get(f"{self._target.url}/models")
            return name or str(answer.raise_for_status().json()["data"][0]["id"])
        except (HTTPError, InvalidURL, TimeoutError) as error:
            got, fix = str(error) or type(error).__name__, "start it, or check --base-url and --api-key"
            raise ConfigError(f"{self._target.name} does not answer", got=got, fix=fix) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self._target.name} names no model", got=error, fix="give --model") from None

    async def ask(self, ask: Ask) -> ClientReply:
        """Send a request and read its stream to the end, or until it fails."""
        from httpx2 import ConnectError, HTTPError, InvalidURL

        reply = ClientReply(time.perf_counter())
        try:
            async with (
                asyncio.timeout(self._target.timeout_s),
                self._http.stream(
                    "POST", self._target.url + ask.path, json=ask.body, headers=dict(ask.headers)
                ) as response,
            ):
                if response.status_code != 200:
                    reply.error, reply.detail = f"HTTP {response.status_code}", await _message(response)
                elif not await _read(response, reply):
                    reply.error = "disconnected"
        except TimeoutError:
            reply.error = "timeout"
        except ConnectError as error:
            reply.error, reply.detail = "no connection", str(error)
        except (HTTPError, InvalidURL) as error:
            reply.error, reply.detail = "disconnected", str(error) or type(error).__name__
        except _StreamError as error:
            reply.error, reply.detail = "error in the stream", str(error)[:_SHOWN]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reply.error, reply.detail = "malformed", str(error)[:_SHOWN]
        reply.end_s = reply.end_s or time.perf_counter()
        return reply

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()


class _StreamError(Exception):
    """The stream holds an error of the server."""


async def _message(response: "Response") -> str:
    """The beginning of the message of an error response."""
    received = b""
    async for data in response.aiter_bytes():
        received += data
        if len(received) > 16 * _SHOWN:
            break
    try:
        return str(json.loads(received)["error"]["message"])[:_SHOWN]
    except (ValueError, LookupError, TypeError, RecursionError):
        return received.decode(errors="replace")[:_SHOWN]


async def _read(response: "Response", reply: ClientReply) -> bool:
    """Read events into a reply; whether the answer has come to its end."""
    rest, ended = b"", False
    pieces = response.aiter_bytes()
    async for data in pieces:
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise ValueError("a line without an end")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    reply.end_s = now
                    await _finish(pieces)
                    return ended
                ended |= _note(json.loads(payload), reply, now)
    if not ended and not reply.piece_s and rest.strip():
        raise ValueError(f"no events but {rest[:_SHOWN]!r}")
    return ended


async def _finish(pieces: AsyncIterator[bytes]) -> None:
    """Read the response to its end after the last event, so that the connection can be used again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING_S):
            async for _ in pieces:
                pass


def _note(chunk: dict[str, Any], reply: ClientReply, now: float) -> bool:
    """Take a chunk into a reply; whether it ends the answer."""
    if chunk.get("error"):
        error = chunk["error"]
        raise _StreamError(error.get("message", error) if isinstance(error, dict) else error)
    if usage := chunk.get("usage"):
        reply.prompt_tokens, reply.completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        reply.cached_tokens = None if cached is None else int(cached)
    ended = False
    for choice in chunk["choices"]:
        delta = choice.get("delta") or choice
        text = delta.get("content") or delta.get("text") or ""
        reply.text += text
        token_ids = choice.get("token_ids") or []
        reply.token_ids += token_ids
        ended |= choice.get("finish_reason") is not None
        if text or token_ids or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
            reply.piece_s.append(now)
    if ended and not reply.piece_s:
        reply.piece_s.append(now)
    return ended
