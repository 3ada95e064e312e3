"""Adapters of weights that stay quantised: tokens are those of dense weights with the adapter's added."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import Model
from jinfercept.models.peft_adapter import read_adapter
from jinfercept.models.protocol import Params
from jinfercept.sampling_params import SamplingParams
from tests.support import tiny_gguf
from tests.support.peft_adapters import write_adapter
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import streams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(seed).integers(0, 100, 5 + 4 * seed).tolist()} for seed in range(3)
]


@pytest.mark.parametrize("kind", [pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_1"])
def test_weights_that_stay_quantised_have_adapters(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    tiny_gguf.write(file, kind=kind, layers=({}, {}), vocab_size=VOCAB)
    places = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    places |= {"attn_output": "self_attn.o_proj"} | {
        f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")
    }
    shapes = {
        f"model.layers.{i}.{places[name.removesuffix('.weight')]}.weight": shape
        for i in range(2)
        for name, shape in tiny_gguf.LAYER.items()
        if name.removesuffix(".weight") in places
    }
    written = {letter: write_adapter(tmp_path / letter, shapes, seed=place) for place, letter in enumerate("ab")}
    flags: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    flags |= {"profile": "paper-gptj-6b-a100", "kv_tokens": 1024, "tokenizer": byte_level()}
    with LLM(file, quantization="gguf", loras=written, **flags) as llm:
        made = streams(llm.generate(PROMPTS * 3, GREEDY, lora=[name for name in (None, "a", "b") for _ in PROMPTS]))
    dense, expected = load(file, dtype="float32", quantization="none"), list[list[int]]()
    for adapter in (None, *written.values()):
        params = dense.params if adapter is None else with_change(dense.model, dense.params, adapter)
        with LLM(dense.model, params=params, **flags) as llm:
            expected += streams(llm.generate(PROMPTS, GREEDY))
    assert made == expected


def with_change(model: Model, params: Params, directory: Path) -> Params:
    """Weights, apart, with those of an adapter added."""
    layers = list[dict[str, Any]]()
    for layer, factors in zip(separate(params).layers, read_adapter(directory, model.config).layers, strict=True):
        changes = {name: np.tensordot(a, b, axes=1) for name, (a, b) in factors.items()}
        layers.append({name: weight + changes.get(name, 0.0) for name, weight in layer.items()})
    return params._replace(layers=tuple(layers))
