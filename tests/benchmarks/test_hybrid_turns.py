"""Models with states or windows find what full pages hold, as a Llama does, and say what they say without a cache."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hybrid_turns import (
    ENGINE,
    IN_TOKENS,
    LENGTH,
    PROTOCOLS,
    HttpClient,
    HybridTurns,
    Shape,
    num_different,
    play_in_library,
    write_model,
)
from jinfercept.errors import ConfigError
from jinfercept.kv.extent import TOKEN_BYTES, common_pages, token_bytes
from jinfercept.llm import LLM
from tests.support.live_server import MODEL, running

SHAPE = Shape(first=40, new=15, answer=15, turns=3)
SIZE = ENGINE["page_size"]


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model(request.param, tmp_path_factory.mktemp("models") / "model")
    flags = ENGINE | {"kv_tokens": LENGTH, "swap_space": 0.05, "lazy": True, "check_pages": True}
    with LLM(str(folder), **flags) as llm:
        yield llm


def test_messages_of_gpt_oss_end_a_turn_with_a_token_that_ends_no_answer(tmp_path: Path) -> None:
    folder = write_model("gpt_oss", tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        parsed = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(parsed | {"eos_token_id": 1}))
    for name, eos in (("tokenizer.json", "<|end|>"), ("tokenizer_config.json", "<s>")):
        (folder / name).write_text((folder / name).read_text().replace('"]"', f'"{eos}"'))
    with LLM(str(folder), **ENGINE, kv_tokens=LENGTH, lazy=True) as llm:
        cached = [each.cached for each in play_in_library(llm, "system prompt", SHAPE, seed=0)]
    assert cached == [0, 144, 112, 144, 112, 144]


@pytest.mark.parametrize("name", IN_TOKENS)
def test_as_many_tokens_are_found_as_full_pages_have(llm: LLM, name: str) -> None:
    answered = play_in_library(llm, name, SHAPE, seed=0)
    cached_tokens = shared_tokens = 0
    for number, (prompt, _, cached) in enumerate(answered):
        earlier = [[*each.prompt, *each.answer[:-1]] for each in answered[:number]]  # nothing follows the last token
        rest = token_bytes(prompt[:-1])
        shared = [common_pages(token_bytes(tokens), rest, 0, SIZE * TOKEN_BYTES) for tokens in earlier]
        shared_tokens += SIZE * max(shared, default=0)
        cached_tokens += cached
    assert shared_tokens > SHAPE.first
    assert cached_tokens >= 0.95 * shared_tokens
    assert num_different(llm, answered) == 0


def test_a_conversation_without_its_reasoning_comes_back_from_the_host(llm: LLM) -> None:
    with running(llm) as server:
        for protocol in PROTOCOLS.values():
            llm.restart(enable_prefix_caching=True)
            client = HttpClient(server.http, protocol, MODEL, random.Random(0))
            assert client.play(SHAPE, drops=True, evicts=True) == [(60, 0), (100, 48), (140, 96)]
            assert llm.counters.copied_in > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"vllm_python": "/no/python"}, "--vllm-python is no program"), ({"json": "/no/x"}, "--json cannot be written")],
)
def test_what_cannot_be_used_is_refused_before_anything_is_measured(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HybridTurns(**flags).run()  # pyright: ignore[reportArgumentType]
