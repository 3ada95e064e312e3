"""Engines whose activations are rounded to int8 before quantised weights multiply them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.models.quantized import is_quantized, weights_of
from tests.support.dense_model import logits
from tests.support.sample_tokenizers import byte_level
from tests.support.tiny_gguf import write
from tests.support.tiny_model import GOLDEN, TOOL, Workload, streams, tiny_llm

V = 128
WORKLOAD = Workload(number=8, seed=3, vocab=V)
SIZES = {
    "kv_tokens": 112,
    "max_model_len": 100,
    "page_size": 4,
    "swap_space": 0.01,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write(path, kind="Q4_1", vocab_size=V)
    return path


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, tokenizer=byte_level(), quantization="gguf", activation_dtype="int8", **SIZES) as llm:
        yield llm


def test_logits_are_near_those_of_activations_that_are_not_rounded(checkpoint: Path) -> None:
    exact = load(checkpoint, dtype="float32", quantization="gguf")
    near = load(checkpoint, dtype="float32", quantization="gguf", activation_dtype="int8")
    assert all(weight.int8_rows for weight in weights_of(near.params) if is_quantized(weight))
    tokens = jnp.arange(3, 40)
    expected, got = (np.asarray(logits(loaded.model, loaded.params, tokens)) for loaded in (exact, near))
    assert 0 < np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(("policy", "depth", "chunk"), [("discard", 0, 3), ("copy_ahead", 1, 5)])
def test_contexts_that_are_moved_or_recomputed_give_the_same_tokens(
    small: LLM, policy: str, depth: int, chunk: int | None
) -> None:
    small.restart(policy="preserve", enable_prefix_caching=False)
    each = zip(WORKLOAD.prompts, WORKLOAD.params, WORKLOAD.detectors, strict=True)
    alone = [small.generate(prompt, params, tools=[TOOL], detector=detector)[0] for prompt, params, detector in each]
    small.restart(policy=policy, enable_prefix_caching=True, pipeline_depth=depth, max_chunk_tokens=chunk)
    assert streams(WORKLOAD.run(small, delay_s=0.003)) == streams(alone)


def test_a_profile_of_other_products_is_not_taken(small: LLM) -> None:
    assert "of int8 rows" in small.profile.tables["settings"]["weights"]


def test_a_model_without_such_weights_is_refused(checkpoint: Path) -> None:
    tries: list[tuple[Path, dict[str, Any], str]] = [
        (GOLDEN / "llama_gqa", {}, "no quantisation"),
        (GOLDEN / "llama_gqa", {"load_format": "dummy"}, "random weights"),
        (checkpoint, {"quantization": "none"}, "gguf quantisation, quantization=none on 1 devices"),
    ]
    for model, options, got in tries:
        with pytest.raises(ModelError, match=got):
            LLM(model, activation_dtype="int8", **options)
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    with pytest.raises(ModelError, match="activation_dtype=auto"):
        LLM(loaded.model, params=loaded.params, activation_dtype="int8")
    with pytest.raises(ConfigError, match="activation_dtype is one of auto, int8"):
        tiny_llm(activation_dtype="int4")
