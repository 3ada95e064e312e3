"""Answers with log probabilities: what a body may ask for, and how large answers are written."""

from typing import Any

import pytest
from served import Running

from jinfercept.forks import forks
from jinfercept.request import Request, SamplingParams
from jinfercept.server.errors import ApiError
from jinfercept.server.report_size import MAX_ENTRIES, check_report

ROOM = 2**15


def asked(
    prompts: int, tokens: int, max_tokens: int | None, n: int = 1, *, prompt: int | None = None, best: int | None = None
) -> None:
    """What `/v1/completions` checks of a body; `prompt` and `best` are numbers of best tokens."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    requests = [one for place in range(prompts) for one in forks(Request(f"{place}", (1,) * tokens, params))]
    check_report(requests, ROOM, [("prompt_logprobs", prompt)], ("logprobs", best), per_choice=True)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hi" * 950, "max_tokens": 1, "n": 128, "prompt_logprobs": 20, "temperature": 1},
        {
            "prompt": [f"hi{place}" * 500 for place in range(100)],
            "max_tokens": 1,
            "n": 8,
            "prompt_logprobs": 20,
            "logprobs": 20,
            "echo": True,
        },
        {"prompt": "hi" * 950, "max_tokens": 0, "n": 128, "logprobs": 20, "echo": True},
    ],
)
def test_a_body_that_asks_for_millions_of_log_probabilities_is_refused(served: Running, body: dict[str, Any]) -> None:
    answer = served.http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "logprobs" if body.get("echo") else "prompt_logprobs")
    assert f"{MAX_ENTRIES}" in error["message"]


def test_a_conversation_with_too_many_log_probabilities_is_refused(served: Running) -> None:
    answer = served.chat(n=128, logprobs=True, top_logprobs=20, max_tokens=None, temperature=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    assert served.chat(n=2, logprobs=True, top_logprobs=20, temperature=1).status_code == 200


@pytest.mark.parametrize(
    "ordinary",
    [
        {"prompts": 1, "tokens": 2000, "max_tokens": 1, "prompt": 5},
        {"prompts": 1, "tokens": 100, "max_tokens": 1000, "n": 4, "best": 5},
        {"prompts": 16, "tokens": 1000, "max_tokens": 1, "prompt": 5, "best": 5},
        {"prompts": 1, "tokens": 10, "max_tokens": None, "best": 20},
        {"prompts": 1, "tokens": 10, "max_tokens": 2**31, "best": 20},
        {"prompts": 2048, "tokens": 1000, "max_tokens": None, "n": 4},
    ],
)
def test_what_evaluations_and_clients_ask_for_is_not_refused(ordinary: dict[str, Any]) -> None:
    asked(**ordinary)


def test_every_choice_counts_and_every_copy_of_a_report() -> None:
    asked(2, 2**11, 1, 4, prompt=20, best=0)
    with pytest.raises(
        ApiError, match=f"got {16 * 2**11 * 2 * 21 + 32}, {16 * 2**11 * 2 * 21} of them by prompt_logprobs"
    ):
        asked(2, 2**11, 1, 16, prompt=20, best=0)
    request = Request("one", (1,) * 8, SamplingParams(max_tokens=2**14))
    check_report([request], ROOM, (), ("top_logprobs", 20), copies=3)
    with pytest.raises(ApiError, match="by top_logprobs"):
        check_report([request], ROOM, (), ("top_logprobs", 20), copies=5)
