"""Gemma 4: layers with other heads in a pool of their own, layers that read others' keys; tokens are those of transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.load import load
from jinfercept.sampling_params import SamplingParams
from tests.support.tiny_model import GOLDEN, Workload, all_return_at_once, count_ties, tiny_llm

NAMES = ("gemma4", "gemma4_moe", "gemma4_e4b", "gemma4_e2b")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:-1]]
SIZES: dict[str, Any] = {"page_size": 16, "max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_tokens": 160}


@pytest.fixture(scope="module", params=["gemma4_e2b", *SLOW])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    """An engine whose pools are short, with its model's name."""
    with tiny_llm(request.param, **SIZES) as llm:
        yield request.param, llm


def slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("policy", ["swap", *slow("discard", "min_waste", "copy_ahead", "preserve")])
@pytest.mark.parametrize("depth", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_every_policy_gives_the_greedy_tokens(model: tuple[str, LLM], policy: str, depth: int) -> None:
    name, llm = model
    llm.restart(policy=policy, pipeline_depth=depth)
    outputs = Workload(8, seed=3).run(llm, delay_s=0.002) + all_return_at_once(llm, prompt=60)
    assert sum(count_ties(name, output) for output in outputs) <= 1
    counters = llm.counters
    assert counters.interceptions > 0
    assert counters.copied_out > 0 or policy in ("discard", "preserve")
    assert counters.recomputed > 0 or policy != "discard"


def test_log_probabilities_of_a_prompt_are_those_of_transformers(model: tuple[str, LLM]) -> None:
    name, llm = model
    golden = np.load(GOLDEN / f"{name}.npz")
    for number in range(2):
        tokens = golden[f"tokens_{number}"].tolist()
        expected = np.asarray(jax.nn.log_softmax(golden[f"logits_{number}"]))[range(len(tokens) - 1), tokens[1:]]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        [output] = llm.generate({"prompt_token_ids": tokens}, params)
        given = output.prompt_logprobs
        assert given is not None
        ours = [(place or {})[token].logprob for token, place in zip(tokens[1:], given[1:], strict=True)]
        np.testing.assert_allclose(ours, expected, atol=1e-4)
        assert output.outputs[0].token_ids == [golden[f"logits_{number}"][-1].argmax()]


def test_pools_have_the_sizes_of_their_layers_and_shared_layers_none(model: tuple[str, LLM]) -> None:
    name, llm = model
    runner, plan = llm.engine.setup.runner, llm.memory_plan
    assert runner.second is not None
    shapes = {array.shape[2:] for array in runner.kv.layers}, {array.shape[2:] for array in runner.second.layers}
    num_kv_heads = {"gemma4": (1, 2), "gemma4_moe": (1, 2), "gemma4_e4b": (2, 2), "gemma4_e2b": (1, 1)}[name]
    assert shapes == ({(2, num_kv_heads[0], 16)}, {(2, num_kv_heads[1], 8)})
    assert (len(runner.kv.layers), len(runner.second.layers)) == (1, 2)
    assert sum(array.nbytes for array in runner.kv.layers) == plan.kv_bytes
    assert sum(array.nbytes for array in runner.second.layers) == plan.window_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flags", [{"kv_cache_dtype": "int8"}, {"layers_per_step": 2}, {"max_model_len": 16}])
def test_options_of_the_engine_serve_it(name: str, flags: dict[str, Any]) -> None:
    """Quantised pages, several layers an executable, and sequences that no window is shorter than."""
    with tiny_llm(name, **SIZES | flags) as llm:
        tokens = np.load(GOLDEN / f"{name}.npz")["tokens_1"].tolist()[:10]
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": tokens}, params)
        assert count_ties(name, output) == 0 or "kv_cache_dtype" in flags


def test_layers_with_other_heads_need_their_own_pool() -> None:
    with pytest.raises(ConfigError, match=r"heads of other sizes.*num_window_tokens=0"):
        tiny_llm("gemma4", **SIZES, num_window_tokens=0)


def test_a_wrapper_that_reads_images_has_the_model_that_reads_text(tmp_path: Path) -> None:
    directory = copytree(GOLDEN / "gemma4_e2b", tmp_path / "m")
    text = json.loads((directory / "config.json").read_text())
    del text["per_layer_config"]  # as published: with the head dim of layers without a window beside the other
    text |= {"global_head_dim": 16, "num_global_key_value_heads": None, "use_bidirectional_attention": "vision"}
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole | {"vision_config": {}, "tie_word_embeddings": True}))
    tensors = load_file(directory / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    shared = "model.language_model.layers.4.self_attn"  # published, and read by no one
    wrapped |= {f"{shared}.{name}.weight": tensors["model.norm.weight"] for name in ("k_proj", "v_proj", "k_norm")}
    images = ("vision_tower.x", "embed_vision.x", "audio_tower.x", "embed_audio.x")
    wrapped |= {f"model.{name}": tensors["model.norm.weight"] for name in images}
    save_file(wrapped, directory / "model.safetensors")
    given, expected = load(directory, dtype="float32"), load(GOLDEN / "gemma4_e2b", dtype="float32")
    assert given.model.config == expected.model.config
    jax.tree.map(np.testing.assert_array_equal, given.params, expected.params)


def test_a_unified_wrapper_has_what_its_config_leaves_out() -> None:
    text = json.loads((GOLDEN / "gemma4" / "config.json").read_text())
    expected = config_from_hf(text | {"sliding_window": 1024, "max_position_embeddings": 262_144})
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "sliding_window", "enable_moe_block"):
        del text[key]
    del text["max_position_embeddings"]
    whole = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    text |= {"model_type": "gemma4_unified_text", "architectures": None}
    assert config_from_hf(whole | {"text_config": text, "vision_config": {}}) == expected


@pytest.mark.parametrize("rope", [{"rope_theta": 500.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}])
def test_one_rotary_embedding_for_layers_of_two_types_is_refused(rope: dict[str, Any]) -> None:
    config = json.loads((GOLDEN / "gemma4" / "config.json").read_text())
    with pytest.raises(ModelError, match=r"rope_parameters of config.json.* rope_theta 500\.0"):
        config_from_hf(config | {"rope_parameters": rope})


def test_heads_are_those_of_every_layer_in_models_of_ten_and_more() -> None:
    """transformers names ten and more layers with two digits, as the published models have them."""
    config = json.loads((GOLDEN / "gemma4_e2b" / "config.json").read_text())
    del config["per_layer_config"]
    types = [*["sliding_attention"] * 4, "full_attention"] * 7
    sizes = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "global_head_dim": 16}
    kinds = config_from_hf(config | sizes | {"layer_types": types}).kinds
    assert [kind.head_dim for kind in kinds] == [*[8] * 4, None] * 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "one head dim"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, "one head dim"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"enable_moe_block": True}, "num_experts, top_k_experts, moe_intermediate_size"),
    ],
)
def test_keys_that_change_numbers_and_are_not_understood_are_refused(changes: dict[str, Any], words: str) -> None:
    config = json.loads((GOLDEN / "gemma4_e2b" / "config.json").read_text())
    with pytest.raises(ModelError, match=words):
        config_from_hf(config | changes)
