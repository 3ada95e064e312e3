"""Reading `config.json`: both spellings of rope, and refused values."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ModelError
from jinfercept.models.config import RopeConfig
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.model import kv_bytes_per_token

GOLDEN = Path(__file__).parent.parent / "golden"


def _tiny(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_ministral_3_without_rope_parameters_has_the_defaults_of_transformers():
    config = _tiny("ministral3")
    del config["rope_parameters"]
    assert config_from_hf(config | {"rope_parameters": None}).rope == config_from_hf(config).rope


def test_gpt_oss_has_yarn_unless_its_config_has_rope_parameters_even_empty_ones():
    config = _tiny("gpt_oss") | {"rope_scaling": None}
    scalings = [config_from_hf(config | {"rope_parameters": rope}).rope for rope in (None, {})]
    assert [(rope.scaling, rope.theta) for rope in scalings] == [("yarn", 150_000.0), ("none", 150_000.0)]


@pytest.mark.parametrize(
    ("name", "change", "windows"),
    [
        ("mistral", {"sliding_window": 4096}, [4096, 4096]),
        ("mistral", {"sliding_window": 32}, [32, 32]),
        ("mistral", {"sliding_window": None}, []),
        ("mistral", {"sliding_window": 32, "use_sliding_window": False}, [32, 32]),
        ("llama_tied", {"sliding_window": 32}, []),
        ("llama_tied", {"sliding_window": 32, "use_sliding_window": True}, []),
        ("olmo2", {"sliding_window": 32, "use_sliding_window": True}, []),
        ("gpt_oss", {"sliding_window": 32, "use_sliding_window": False}, [32, None]),
        ("gemma3", {"sliding_window": 32, "sliding_window_pattern": 2}, [32, None, 32]),
        ("gemma3", {"sliding_window": 32, "sliding_window_pattern": None}, [32, 32, 32]),
        (
            "qwen3_moe",
            {"sliding_window": 32, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            [32, 32],
        ),
        ("qwen2", {"sliding_window": 32}, []),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [None, 32]),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28}, []),
        (
            "qwen3",
            {"sliding_window": 32, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            [32, None],
        ),
    ],
)
def test_layers_are_windowed_where_transformers_has_them(name, change, windows):
    config = _tiny(name)
    config.pop("layer_types", None)
    config = config_from_hf(config | change)
    assert [kind.window for kind in config.kinds] == windows
    assert config.max_position == 128


def test_olmo_3_as_transformers_4_wrote_it_scales_its_full_layers_alone():
    config = _tiny("olmo3")
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    read = config_from_hf(config | {"rope_theta": 700.0, "rope_scaling": scaling})
    assert (read.rope.theta, read.rope.scaling, read.rope.factor) == (700.0, "yarn", 8.0)
    assert [kind.window for kind in read.kinds] == [20, 20, 20, None, 20]
    assert read.kinds[0].rope == RopeConfig(500_000.0, 16)  # transformers takes `rope_theta` for the full layers alone
    assert read.kinds[3].rope is None


def test_a_scaling_beside_gemma_3s_rotations_joins_that_of_the_full_layers():
    read = config_from_hf(_tiny("gemma3") | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert (read.rope.theta, read.rope.factor) == (500.0, 2.0)
    assert read.kinds[0].rope == RopeConfig(100.0, 16)


GPTJ_6B = {  # EleutherAI/gpt-j-6b, as published in 2021
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "vocab_size": 50400,
}


def test_gptj_6b_is_read_as_published():
    config = config_from_hf(GPTJ_6B)
    assert (config.max_position, config.head_dim, config.ffn_size, config.vocab_size) == (2048, 256, 16384, 50400)
    assert (config.rope.rotary_dim, config.eos_token_ids) == (64, (50256,))
    assert kv_bytes_per_token(config, "float16") == 448 * 1024


def test_keys_of_published_configs_are_understood():
    configs = json.loads((Path(__file__).parent / "published_configs.json").read_text())
    assert {name: config_from_hf(config).vocab_size > 0 for name, config in configs.items()} == dict.fromkeys(
        configs, True
    )
    quantised = GPTJ_6B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert config_from_hf(quantised) == config_from_hf(GPTJ_6B)


def test_reading_a_config_prints_nothing():
    code = (
        "import json, sys; from jinfercept.models import hf_config as h; h.config_from_hf(json.load(open(sys.argv[1])))"
    )
    path = GOLDEN / "llama_gqa" / "config.json"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_old_llama_configs_have_full_attention_and_derived_head_dim():
    config = _tiny("llama_gqa") | {"head_dim": None, "num_key_value_heads": None}
    read = config_from_hf(config)
    assert (read.num_kv_heads, read.head_dim) == (4, 8)


def test_end_of_sequence_tokens_come_from_both_files_once():
    config = _tiny("llama_gqa") | {"eos_token_id": 2}
    assert config_from_hf(config, {"eos_token_id": [7, 2]}).eos_token_ids == (2, 7)
    assert config_from_hf(config | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "llama_yarn"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_scaling_of_transformers_4_reads_like_rope_parameters_of_5(name, type_key):
    new = _tiny(name)
    scaling = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    scaling[type_key] = scaling.pop("rope_type")
    assert config_from_hf(old) == config_from_hf(new)


def test_yarn_multiplies_by_the_papers_factor_unless_told_otherwise():
    config = _tiny("llama_yarn")
    assert config_from_hf(config).rope.attention_factor == pytest.approx(1.138629)
    config["rope_parameters"]["attention_factor"] = 0.9
    assert config_from_hf(config).rope.attention_factor == 0.9
    config["rope_parameters"] |= {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert config_from_hf(config).rope.attention_factor == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"hidden_size": None, "num_attention_heads": None}, "no hidden_size, num_attention_heads"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_key_value_heads": 3}, "4 and 3"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"max_position_embeddings": "a"}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor"),
    ],
)
def test_what_would_run_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        config_from_hf(_tiny("llama_gqa") | change)


def test_sizes_that_gemma_3_of_4b_does_not_state_are_those_of_transformers() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = config_from_hf(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.rope.theta, config.rope.factor, config.tie_embeddings) == (1e6, 8.0, True)
    assert [kind.window for kind in config.kinds[:6]] == [1024] * 5 + [None]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("mistral", {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}),
        ("ministral3", {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}),
        ("qwen3", {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}),
    ],
)
def test_the_text_part_of_a_model_that_reads_images_is_that_of_its_family(name: str, whole: dict[str, Any]) -> None:
    text = _tiny(name)
    rope = text["rope_parameters"]
    if name == "qwen3":
        text |= {"model_type": "qwen3_vl_text", "rope_parameters": rope | {"mrope_section": [4, 2, 2]}}
    del text["architectures"]
    outer = {"tie_word_embeddings": text.pop("tie_word_embeddings"), "vision_config": {"num_hidden_layers": 2}}
    assert config_from_hf({**whole, **outer, "text_config": text}) == config_from_hf(_tiny(name))


def test_only_ministral_3_has_queries_that_grow() -> None:
    rope = _tiny("ministral3")["rope_parameters"]
    with pytest.raises(ModelError, match="llama_4_scaling_beta"):
        config_from_hf(_tiny("mistral") | {"rope_parameters": rope})
    with pytest.raises(ModelError, match="llama_4_scaling_beta"):
        config_from_hf(_tiny("ministral3") | {"rope_parameters": rope | {"llama_4_scaling_beta": "0.5"}})
