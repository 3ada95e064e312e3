"""Answers with log probabilities: limits on a body, and encoding of large answers."""

import json
from typing import Any

import pytest

from jinfercept.engine.parallel_sampling import forks
from jinfercept.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.serve.protocols.encoding import Lazy, encode, encode_parts
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.completion_answer import CompletionAnswer, CompletionBody
from jinfercept.serve.protocols.openai.logprobs import MAX_ENTRIES, check_report
from tests.support.live_server import Running
from tests.support.scripted_model import Scripted

ROOM = 2**15


def check_body(
    prompts: int, tokens: int, max_tokens: int | None, n: int = 1, *, prompt: int | None = None, best: int | None = None
) -> None:
    """The check of a body of `/v1/completions`; `prompt` and `best` are numbers of best tokens."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    requests = [request for place in range(prompts) for request in forks(Request(f"{place}", (1,) * tokens, params))]
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
    check_body(**ordinary)


def test_every_choice_counts_and_every_copy_of_a_report() -> None:
    check_body(2, 2**11, 1, 4, prompt=20, best=0)
    with pytest.raises(
        ApiError, match=f"got {16 * 2**11 * 2 * 21 + 32}, {16 * 2**11 * 2 * 21} of them by prompt_logprobs"
    ):
        check_body(2, 2**11, 1, 16, prompt=20, best=0)
    request = Request("one", (1,) * 8, SamplingParams(max_tokens=2**14))
    check_report([request], ROOM, (), ("top_logprobs", 20), copies=3)
    with pytest.raises(ApiError, match="by top_logprobs"):
        check_report([request], ROOM, (), ("top_logprobs", 20), copies=5)


def test_all_choices_of_a_prompt_have_its_report(scripted: Scripted) -> None:
    reports = [{65: Logprob(-1.0, 1, "A"), 66: Logprob(-2.0, 2, "B")}] * 3
    params = SamplingParams(n=16, max_tokens=1, logprobs=1, prompt_logprobs=1)
    requests = forks(Request("one", (65,) * 4, params))
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    outputs = {
        request.id: RequestOutput(
            request.id,
            "AAAA",
            [65] * 4,
            [CompletionOutput(0, "A", [65], "length", logprobs=[{65: Logprob(-1.0, 1, "A")}])],
            0,
            metrics,
            prompt_logprobs=[None, *reports] if request.leader is None else None,
        )
        for request in requests
    }
    body = CompletionBody(prompt="AAAA", n=16, logprobs=1, prompt_logprobs=1, echo=True)
    answer = CompletionAnswer("one", "model", body, requests, scripted.tokenizer, {})
    choices = json.loads(encode(answer.whole([*outputs.values()])))["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [4] * 16
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in choices] == [5] * 16
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[*range(5)]] * 16


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 1000])
def test_an_answer_in_parts_is_the_answer_in_one_piece(number: int) -> None:
    def answer(lazy: Any) -> dict[str, Any]:
        choice = {
            "text": "\u2028é",
            "logprobs": {"content": lazy({"token": "é", "bytes": [195]} for _ in range(number))},
        }
        choices = [choice | {"index": 0}, {"index": 1, "logprobs": {"content": lazy(iter(()))}, "text": ""}]
        numbers = [[place] * (place % 130) for place in range(number)]
        return {"choices": choices, "empty": [], "nothing": {}, "usage": None, "ids": [*range(number)], "more": numbers}

    parts = list(encode_parts(answer(Lazy)))
    assert b"".join(parts) == encode(answer(list)) == encode(answer(Lazy))
    assert max(map(len, parts)) < 64 * 64 * 4


def test_log_probabilities_of_tokens_without_text_come_with_the_end_of_a_stream(
    served: Running, scripted: Scripted
) -> None:
    special = scripted.tokenizer.encode("<s>")
    body = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "allowed_token_ids": special, "max_tokens": 300}
    lines = served.chat(stream=True, **body).text.split("\n\n")[:-2]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 300
    assert choices[-1]["finish_reason"] == "length"
