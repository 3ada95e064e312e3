"""The experts of tokens over HTTP, as vLLM writes them."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept.llm import LLM
from jinfercept.models.load import read_config
from jinfercept.sampling_params import SamplingParams
from tests.support.live_server import Running, running
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import GOLDEN

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WANTED = {"return_routed_experts": True, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, return_routed_experts=True)


def small(name: str, **flags: Any) -> LLM:
    config = replace(read_config(GOLDEN / name), vocab_size=VOCAB, eos_token_ids=())
    sizes: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_tokens": 512}
    sizes |= {"profile": "paper-gptj-6b-a100", "dtype": "float32"}
    return LLM(config, load_format="dummy", tokenizer=byte_level(), **sizes, **flags)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("chat") / "plain.jinja"
    template.write_text(TEMPLATE)
    with (
        small("mixtral", enable_return_routed_experts=True) as llm,
        running(llm, chat_template=str(template)) as server,
    ):
        yield server


def decoded(choice: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def expected(routed: Running, prompt: str) -> np.ndarray:
    [output] = routed.llm.generate(prompt, PARAMS)
    return output.outputs[0].routed_experts


def test_every_choice_of_a_chat_has_those_of_the_prompt_too(routed: Running) -> None:
    plain = routed.chat(return_token_ids=True, n=2, **WANTED | {"temperature": 1}).json()
    assert all("routed_experts" in choice for choice in plain["choices"])
    num_tokens = len(plain["prompt_token_ids"]) + 4 - 1
    first, second = (decoded(choice) for choice in plain["choices"])
    assert len(first) == len(second) == num_tokens
    np.testing.assert_array_equal(first[: num_tokens - 3], second[: num_tokens - 3])
    assert (second >= 0).all()
    assert "routed_experts" not in routed.chat().json()["choices"][0]
    np.testing.assert_array_equal(decoded(routed.chat(**WANTED).json()["choices"][0]), expected(routed, "Hi"))


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("chat/completions", {"stream": True}, "return_routed_experts cannot be streamed"),
        ("completions", {"stream": True}, "return_routed_experts cannot be streamed"),
        ("completions", {"return_routed_experts": "yes"}, "return_routed_experts: Input should be a valid boolean"),
        ("responses", {}, "return_routed_experts is not supported in responses"),
    ],
)
def test_where_they_cannot_come_is_said(routed: Running, path: str, more: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    fields = {"chat/completions": ("messages",), "completions": ("prompt",), "responses": ("input",)}[path]
    reply = routed.http.post(f"/v1/{path}", json={name: body[name] for name in fields} | WANTED | more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_routed_experts")
    assert message in reply.json()["error"]["message"]


def test_a_body_may_not_ask_for_more_than_log_probabilities_have(
    routed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed.service, "expert_bytes", 1 << 20)
    assert routed.chat(**WANTED).status_code == 200
    reply = routed.chat(n=64, **WANTED | {"temperature": 1, "max_tokens": 100})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_routed_experts")


def refused(server: Running) -> str:
    """The message for both kinds of bodies."""
    replies = server.chat(**WANTED), server.http.post("/v1/completions", json={"prompt": "a"} | WANTED)
    [(status, error)] = {(reply.status_code, tuple(reply.json()["error"].items())) for reply in replies}
    assert (status, dict(error)["param"]) == (400, "return_routed_experts")
    assert server.http.post("/v1/completions", json={"prompt": "a", "return_routed_experts": False}).status_code == 200
    return dict(error)["message"]


def test_a_server_that_returns_none_refuses() -> None:
    with small("mixtral") as llm, running(llm) as server:
        assert "the server returns no experts; fix: start it with --enable-return-routed-experts" in refused(server)


def test_a_model_without_experts_has_none_to_return(served: Running) -> None:
    assert "the model has no experts" in refused(served)
