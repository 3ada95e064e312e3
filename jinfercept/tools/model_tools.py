"""Other models as tools: on another OpenAI-compatible server, or in this process.

A model in this process batches its requests with each other, not with those of the first model.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import httpx2

from jinfercept.sampling_params import SamplingParams
from jinfercept.tools.calls import CallFailed, CallRequest
from jinfercept.tools.http_tool import read_text
from jinfercept.tools.tool_tables import ModelTable, Place

if TYPE_CHECKING:
    from jinfercept.llm import LLM

_MAX_BYTES = 4 << 20


@final
class RemoteModel:
    """A model at a URL. Raises `ConfigError` if the environment variable of its key is not set."""

    def __init__(self, table: ModelTable, place: Place) -> None:
        assert table.base_url is not None
        self._table, self._url = table, f"{table.base_url.rstrip('/')}/chat/completions"
        key = None if table.api_key_env is None else place.expand(f"${{{table.api_key_env}}}", "api_key_env")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._tls = httpx2.create_ssl_context()

    async def __call__(self, request: CallRequest) -> str:
        """Ask the model. Raises `CallFailed` if it fails."""
        table = self._table
        body = {
            "model": table.model,
            "messages": _conversation(table.system, request.arguments),
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
                text = await read_text(response, _MAX_BYTES)
        except (httpx2.TransportError, OSError) as error:
            raise CallFailed(f"the model {table.model} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise CallFailed(f"the model {table.model} says HTTP {response.status_code}: {text[:500]}")
        try:
            answer: Any = json.loads(text)
            content = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CallFailed(f"the answer is no chat completion: {text[:200]}") from error
        return content if isinstance(content, str) else ""


@final
class LocalModel:
    """A model in this process."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._params = SamplingParams(max_tokens=table.max_tokens, temperature=table.temperature)
        self._llm: "LLM | None" = None

    def load(self) -> None:
        """Load the model, which is slow. Raises `ConfigError` and `ModelError` as `LLM` does."""
        assert self._table.path is not None
        from jinfercept.llm import LLM

        options: dict[str, Any] = dict(self._table.options)
        self._llm = LLM(self._table.path, **options)

    async def __call__(self, request: CallRequest) -> str:
        """Ask the model. Raises `CallFailed` if it fails. Cancelling aborts the model's request."""
        assert self._llm is not None, "not loaded"
        messages = _conversation(self._table.system, request.arguments)
        [output] = await self._llm.achat(messages, self._params)
        [completion] = output.outputs
        if completion.finish_reason not in ("stop", "length"):
            raise CallFailed(f"the model {self._table.path} failed: {completion.stop_reason}")
        return completion.messages[-1]["content"] or ""

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()


def _conversation(system: str | None, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    values = list(arguments.values())
    alone = len(values) == 1 and isinstance(values[0], str)
    question = values[0] if alone else json.dumps(dict(arguments), ensure_ascii=False)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]
