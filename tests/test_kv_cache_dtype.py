"""Engines with quantised pages: the same tokens under every policy, depth and chunking, in a pool that is too small."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from tests.support.tiny_model import TOOL, Workload, streams, tiny_llm

WORKLOAD = Workload(number=8, seed=7)
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """In fp8; int8 is among the random mixes of `test_several_devices.py`."""
    flags: dict[str, Any] = {"kv_cache_dtype": "fp8", "transfer_parts": 2, "staging_pages": 2, "profile": None}
    flags |= {"max_num_batched_tokens": 8}
    with tiny_llm(kv_tokens=112, max_model_len=100, swap_space=0.001, **flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def uninterrupted(small: LLM) -> list[list[int]]:
    """One request after the other, for each of which the pool is large enough."""
    small.restart(policy="preserve", enable_prefix_caching=False)
    each = zip(WORKLOAD.prompts, WORKLOAD.params, WORKLOAD.detectors, strict=True)
    outputs = [small.generate(prompt, params, tools=[TOOL], detector=detector)[0] for prompt, params, detector in each]
    assert not small.counters.copied_out
    return streams(outputs)


@pytest.mark.parametrize(
    ("policy", "depth", "chunk"),
    [
        ("discard", 0, 1),
        ("swap", 1, None),
        ("copy_ahead", 1, 3),
    ],
)
def test_contexts_that_are_moved_or_recomputed_in_any_chunks_give_the_same_tokens(
    small: LLM, uninterrupted: list[list[int]], policy: str, depth: int, chunk: int | None
) -> None:
    small.restart(policy=policy, enable_prefix_caching=True, pipeline_depth=depth, max_chunk_tokens=chunk)
    assert streams(WORKLOAD.run(small, delay_s=0.003)) == uninterrupted
    assert small.counters.recomputed + small.counters.copied_out > 0, "the pool was never short"


def test_the_scheduler_prices_the_bytes_that_pages_take(small: LLM) -> None:
    runner, shape = small.engine.setup.runner, small.engine.setup.shape
    token_bytes = sum(layer.nbytes for layer in runner.kv.layers) / (shape.num_pages + 1) / shape.page_size
    assert small.profile.kv_bytes_per_token == small.memory_plan.token_bytes(shape.page_size) == token_bytes
    config = small.model.config
    assert token_bytes == 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4)


def test_a_head_dim_that_fills_no_words_is_refused_in_words(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 14}))
    with pytest.raises(ConfigError, match="got int8 and head dim 14; fix: kv_cache_dtype auto"):
        LLM(str(tmp_path), load_format="dummy", kv_cache_dtype="int8")
