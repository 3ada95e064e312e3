"""Counts the tokens of one HTTP request, for its `usage` and for its line in the log."""

from collections.abc import Sequence
from typing import Any, final

from jinfercept.request import Request, RequestOutput


@final
class UsageCount:
    """Grows while the requests run.

    Args:
        requests: forks after their first, whose prompt counts once.
        details: told the same, for the log.
        silent: nobody is told what is generated, so it does not count.
    """

    def __init__(self, requests: Sequence[Request], details: dict[str, Any], *, silent: bool = False) -> None:
        self._prompt = sum(len(request.prompt_token_ids) for request in requests if request.leader is None)
        self._firsts = {request.id for request in requests if request.leader is None}
        self._completion, self._cached = 0, 0
        self._finished = 0
        self._details, self._silent = details, silent
        details["prompt_tokens"] = self._prompt

    def count(self, tokens: int) -> None:
        """So many were generated."""
        self._completion += 0 if self._silent else tokens

    def add(self, output: RequestOutput) -> None:
        """A request is finished; from now on what it says of itself counts."""
        completion = output.outputs[0]
        self._finished += 0 if self._silent else completion.num_generated
        if output.request_id in self._firsts:
            self._cached += output.num_cached_tokens
        self._details.update(
            cached_tokens=self._cached, completion_tokens=self._finished, finish_reason=completion.finish_reason
        )

    def body(self) -> dict[str, Any]:
        """`usage`, as it stands now."""
        completion = max(self._completion, self._finished)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
