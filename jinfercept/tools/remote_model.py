"""A model of another OpenAI-compatible server as a tool."""

import json
from typing import Any, final

import httpx2

from jinfercept.tools.calls import CallFailed, CallRequest
from jinfercept.tools.questions import conversation
from jinfercept.tools.tool_tables import ModelTable, Place

_MAX_BYTES = 4 << 20


@final
class RemoteModel:
    """A model at a URL.

    Args:
        place: of the table, for errors.

    Raises:
        ConfigError: the variable of its key is not set.
    """

    def __init__(self, table: ModelTable, place: Place) -> None:
        assert table.base_url is not None
        self._table, self._url = table, f"{table.base_url.rstrip('/')}/chat/completions"
        key = None if table.api_key_env is None else place.expand(f"${{{table.api_key_env}}}", "api_key_env")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._tls = httpx2.create_ssl_context()

    async def __call__(self, request: CallRequest) -> str:
        """The model's answer. Raises `CallFailed` if it fails."""
        table = self._table
        body = {
            "model": table.model,
            "messages": conversation(table.system, request.arguments),
            "max_tokens": table.max_tokens,
            "temperature": table.temperature,
        }
        try:
            async with (
                httpx2.AsyncClient(verify=self._tls, timeout=None) as client,
                client.stream(
                    "POST", self._url, json=body, headers={**request.call.trace, **self._headers}
                ) as response,
            ):
                text = await _read(response)
        except (httpx2.TransportError, OSError) as error:
            raise CallFailed(f"the model {table.model} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise CallFailed(f"the model {table.model} says HTTP {response.status_code}: {text[:500]}")
        return _content(text)


async def _read(response: httpx2.Response) -> str:
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) > _MAX_BYTES:
            raise CallFailed(f"the answer is longer than {_MAX_BYTES} bytes")
    return data.decode(errors="replace")


def _content(text: str) -> str:
    try:
        answer: Any = json.loads(text)
        content = answer["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CallFailed(f"the answer is no chat completion: {text[:200]}") from error
    return content if isinstance(content, str) else ""
