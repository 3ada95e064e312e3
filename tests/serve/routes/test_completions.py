"""`/v1/completions` and `/tokenize`, and what a body without sampling parameters gets."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jinfercept.serve.protocols.openai.completion_answer import CompletionBody
from jinfercept.serve.routes.engine_requests import sampling_params
from tests.support.chat_templates import QWEN
from tests.support.live_server import END, MODEL, Running, running
from tests.support.scripted_model import Scripted, scripted_llm

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


def test_token_ids_go_on_in_the_form_of_vllm_s_engines(served: Running) -> None:
    params = {"n": 2, "max_tokens": 3, "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    body = {"model": MODEL, "token_ids": [65, 66, 67], "sampling_params": params | {"output_kind": 2}}
    answer = served.http.post("/inference/v1/generate", json=body).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [3, 3]
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [3, 3]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    first, *named = answer["prompt_logprobs"]
    assert (first, [list(each) for each in named]) == (None, [["66"], ["67"]])
    wrong = served.http.post("/inference/v1/generate", json=body | {"sampling_params": {"top_p": 2}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")
    text = served.http.post("/v1/completions", json={"prompt": "a", "logprobs": True, "max_tokens": 1}).json()
    assert len(text["choices"][0]["logprobs"]["top_logprobs"][0]) == 1


@pytest.mark.slow
def test_skyrl_s_client_samples_with_log_probabilities_of_the_prompt(served: Running, scripted: Scripted) -> None:
    name = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
    skyrl = pytest.importorskip(name, reason="skyrl is not installed beside this package")
    scripted.follow()
    params = {"max_tokens": 3, "temperature": 1.0, "seed": 1, "stop_tokens": []}
    chunks = [{"type": "encoded_text", "tokens": tokens} for tokens in ([65, 66], [67])]
    body = {"prompt": {"chunks": chunks}, "num_samples": 2, "sampling_params": params, "include_prompt_logprobs": True}
    client = skyrl.RemoteInferenceClient(
        proxy_url=served.url, server_urls=[served.url], data_parallel_size=1, model_name=MODEL
    )
    sample = asyncio.run(client.sample({"json": body}))
    assert [len(each["logprobs"]) for each in sample["sequences"]] == [
        len(each["tokens"]) for each in sample["sequences"]
    ]
    assert len(sample["prompt_logprobs"]) == 3


def test_a_text_goes_on(served: Running, scripted: Scripted) -> None:
    scripted.follow("Once upon a time" + END)
    done = served.client.completions.create(model=MODEL, prompt="Once", temperature=0, max_tokens=99)
    assert (done.object, done.id[:5]) == ("text_completion", "cmpl-")
    [choice] = done.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " upon a time", "stop")
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 13)
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == 0
    assert (
        served.client.completions.create(model=MODEL, prompt="Once", temperature=0).choices[0].finish_reason == "stop"
    )
    cut = served.client.completions.create(model=MODEL, prompt="O", temperature=0, max_tokens=None)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("nce upon a time", "stop")


def test_a_stream_gives_the_text_in_pieces_and_the_usage_last(served: Running, scripted: Scripted) -> None:
    scripted.follow("Once upon a time" + END)
    chunks = list(
        served.client.completions.create(
            model=MODEL,
            prompt="Once",
            temperature=0,
            max_tokens=99,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
    )
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == " upon a time"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in pieces[:3]] == [1, 2, 3]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 13


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_each_with_several_outputs(served: Running, scripted: Scripted, as_ids: bool) -> None:
    texts = ["one, two", "three, four"]
    scripted.follow(*(text + END for text in texts))
    prompts: Any = ["one", "three"]
    prompts = [scripted.tokenizer.encode(text) for text in prompts] if as_ids else prompts
    create: Any = served.client.completions.create
    done = create(model=MODEL, prompt=prompts, n=2, temperature=0.1, max_tokens=30)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in done.choices] == [", two", ", two", ", four", ", four"]
    assert done.usage.prompt_tokens == 3 + 5
    streamed = dict.fromkeys(range(4), "")
    for chunk in create(model=MODEL, prompt=prompts, n=2, temperature=0.1, max_tokens=30, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == [choice.text for choice in done.choices]


def test_an_echo_has_the_prompt_and_its_log_probabilities(served: Running, scripted: Scripted) -> None:
    scripted.follow("Once!" + END)
    done = served.client.completions.create(
        model=MODEL, prompt="Once", temperature=0, echo=True, logprobs=2, max_tokens=1
    )
    [choice] = done.choices
    assert choice.text == "Once!"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["O", "n", "c", "e", "!"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(logprob is not None and logprob > -1e-3 for logprob in logprobs.token_logprobs[1:])
    assert logprobs.top_logprobs is not None
    assert next(iter(logprobs.top_logprobs[4])) == "!"
    streamed = served.client.completions.create(
        model=MODEL, prompt="Once", temperature=0, echo=True, max_tokens=1, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Once!"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_one_character_have_the_offset_of_its_beginning(
    served: Running, scripted: Scripted, stream: bool
) -> None:
    scripted.follow("Hi é日 you" + END)
    create: Any = served.client.completions.create
    done = create(model=MODEL, prompt="Hi", temperature=0, logprobs=0, max_tokens=20, stop="u!", stream=stream)
    choices = [choice for chunk in done for choice in chunk.choices] if stream else done.choices
    assert "".join(choice.text for choice in choices) == " é日 you"
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == [0, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7]


def test_a_prompt_alone_can_be_scored(served: Running, scripted: Scripted) -> None:
    scripted.follow("Once!" + END)
    done = served.client.completions.create(model=MODEL, prompt="Once", echo=True, logprobs=0, max_tokens=0)
    [choice] = done.choices
    assert choice.text == "Once"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["O", "n", "c", "e"]
    assert choice.logprobs.top_logprobs is not None
    assert [logprob and list(logprob) for logprob in choice.logprobs.top_logprobs] == [None, ["n"], ["c"], ["e"]]
    assert done.usage is not None
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (0, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"echo": True, "stream": True, "logprobs": 1}, "echo"),
    ],
)
def test_a_field_of_a_completion_that_is_wrong_is_named(served: Running, fields: dict[str, Any], param: str) -> None:
    answer = served.http.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_texts_become_tokens_and_tokens_text(served: Running, scripted: Scripted) -> None:
    ids = scripted.tokenizer.encode("Hi<|im_end|>")
    told = served.http.post("/tokenize", json={"prompt": "Hi<|im_end|>", "return_token_strs": True}).json()
    assert told == {"count": 3, "max_model_len": 2048, "tokens": ids, "token_strs": ["H", "i", "<|im_end|>"]}
    assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hi<|im_end|>"}
    chat = served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["tokens"] == scripted.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert served.http.post("/tokenize", json={}).status_code == 400
    info = served.http.get("/tokenizer_info").json()  # with which lm-eval tokenises as the server does
    assert {"bos_token": "<s>", "eos_token": "</s>", "chat_template": QWEN}.items() <= info.items()
