"""The server takes the checkpoint's sampling defaults where a body says nothing, or null."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jinfercept.protocols.openai.completion_schemas import CompletionBody
from jinfercept.server.routes.engine_requests import sampling_params
from tests.support.chat_templates import QWEN
from tests.support.live_server import Running, running
from tests.support.scripted_model import scripted_llm

GIVEN = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.5, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text(json.dumps(GIVEN))
    with scripted_llm(generation_config=str(folder)) as make:
        scripted = make(QWEN)
        scripted.follow()
        with running(scripted.llm) as server:
            yield server


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(GIVEN)], ids=["nothing", "null"])
def test_a_body_that_says_nothing_has_the_defaults(server: Running, fields: dict[str, Any]) -> None:
    body = CompletionBody(model=None, prompt="a", **fields)
    params = sampling_params(body, None, None, server.service, "")
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.0)
    assert (params.repetition_penalty, params.max_tokens) == (1.5, 5)


def test_what_a_body_says_wins(server: Running) -> None:
    body = CompletionBody(model=None, prompt="a", temperature=0, top_k=0, top_p=1, repetition_penalty=1)
    params = sampling_params(body, 7, None, server.service, "")
    assert (params.temperature, params.top_k, params.top_p) == (0, 0, 1)
    assert (params.repetition_penalty, params.max_tokens) == (1, 7)


def test_chats_and_responses_end_where_the_model_says_and_completions_after_16_tokens(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "max_tokens": None}
    chat = server.http.post("/v1/chat/completions", json=body).json()
    assert (chat["usage"]["completion_tokens"], chat["choices"][0]["finish_reason"]) == (5, "length")
    response = server.http.post("/v1/responses", json={"input": "Hi", "ignore_eos": True}).json()
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.5, 0.9, None)
    assert response["usage"]["output_tokens"] == 5
    longer = server.http.post("/v1/chat/completions", json=body | {"max_tokens": 9}).json()
    assert longer["usage"]["completion_tokens"] == 9
    text = server.http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert text["usage"]["completion_tokens"] == 16
