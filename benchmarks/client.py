"""Completions of token ids by OpenAI's client, streamed: for each the time of its first tokens, its usage, or its error."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

from jinfercept.errors import ConfigError


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


async def complete(client: AsyncOpenAI, model: str, prompt: list[int], new_tokens: int) -> Reply:
    """Complete a prompt greedily with so many tokens. A failure is a reply."""
    reply, extra = Reply(time.perf_counter()), {"ignore_eos": True, "return_token_ids": True}
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
