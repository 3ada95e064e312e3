"""Counts the tokens of one HTTP request, for its `usage` and for its log line."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from jinfercept.outputs import FinishReason, RequestOutput
from jinfercept.request import Request


class _Ended(NamedTuple):
    """Counts of one finished request."""

    tokens: int
    reasoning: int
    cached: int
    reason: FinishReason


@final
class UsageCount:
    """Counts tokens while requests run.

    Args:
        requests: of one body; a prompt with forks counts once.
        details: fields of the log line; updated with the counts.
        silent: whether generated tokens are not counted, since the answer does not have them.
    """

    def __init__(self, requests: Sequence[Request], details: dict[str, Any], *, silent: bool = False) -> None:
        self._prompt = sum(len(request.prompt_token_ids) for request in requests if request.leader is None)
        self._firsts = {request.id for request in requests if request.leader is None}
        self._completion = 0
        self._ended: dict[str, _Ended] = {}
        self._details, self._silent = details, silent
        details["prompt_tokens"] = self._prompt

    def count(self, tokens: int) -> None:
        self._completion += 0 if self._silent else tokens

    def add(self, output: RequestOutput) -> None:
        """Count a finished request by its own totals. An output that is added again counts once.

        The finish reason in the log is that of an aborted or failed request, if there is one.
        """
        completion = output.outputs[0]
        cached = output.num_cached_tokens if output.request_id in self._firsts else 0
        tokens, reasoning = (0, 0) if self._silent else (completion.num_generated, completion.num_reasoning)
        self._ended[output.request_id] = _Ended(tokens, reasoning, cached, completion.finish_reason)
        reasons = [ended.reason for ended in self._ended.values()]
        usage = self.body()
        self._details.update(
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=next((reason for reason in reasons if reason in ("abort", "error")), reasons[-1]),
        )

    def body(self) -> dict[str, Any]:
        """The current `usage` object; reasoning counts once its request has ended."""
        ended = self._ended.values()
        completion = max(self._completion, sum(each.tokens for each in ended))
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached for each in ended)},
            "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning for each in ended)},
        }
