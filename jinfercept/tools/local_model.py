"""Another model in this process as a tool. Its requests are batched with each other, not with those of the first model."""

from typing import Any, final

from jinfercept.llm import LLM
from jinfercept.sampling_params import SamplingParams
from jinfercept.tools.calls import CallFailed, CallRequest
from jinfercept.tools.questions import conversation
from jinfercept.tools.tool_tables import ModelTable


@final
class LocalModel:
    """A model in this process."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._params = SamplingParams(max_tokens=table.max_tokens, temperature=table.temperature)
        self._llm: LLM | None = None

    def load(self) -> None:
        """Load the model. Slow. Raises `ConfigError` and `ModelError` as `LLM` does."""
        assert self._table.path is not None
        options: dict[str, Any] = dict(self._table.options)
        self._llm = LLM(self._table.path, **options)

    async def __call__(self, request: CallRequest) -> str:
        """The model's answer. Raises `CallFailed` if it fails. If cancelled, the model's request is aborted."""
        assert self._llm is not None, "not loaded"
        messages = conversation(self._table.system, request.arguments)
        [output] = await self._llm.achat(messages, self._params)
        [completion] = output.outputs
        if completion.finish_reason not in ("stop", "length"):
            raise CallFailed(f"the model {self._table.path} failed: {completion.stop_reason}")
        return completion.messages[-1]["content"] or ""

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
