"""Counts the tokens of one HTTP request, for its `usage` and for its log line."""

from collections.abc import Sequence
from typing import Any, final

from jinfercept.outputs import FinishReason, RequestOutput
from jinfercept.request import Request


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
        self._ended: dict[str, tuple[int, int, int]] = {}  # generated, reasoning and cached tokens, by request
        self._sums = [0, 0, 0]  # of these over all requests: a body may have thousands
        self._reason: FinishReason = "stop"
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
        before = self._ended.get(output.request_id, (0, 0, 0))
        self._ended[output.request_id] = counts = tokens, reasoning, cached
        self._sums = [total + now - then for total, now, then in zip(self._sums, counts, before, strict=True)]
        if self._reason not in ("abort", "error"):
            self._reason = completion.finish_reason
        usage = self.body()
        self._details.update(
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=self._reason,
        )

    def body(self) -> dict[str, Any]:
        """The current `usage` object; reasoning counts once its request has ended."""
        ended, reasoning, cached = self._sums
        completion = max(self._completion, ended)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
