"""Configs and tensors as stranger checkpoints have them: what transformers makes of them, or an error that names them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.config import RopeConfig
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.load import bytes_to_load, load
from jinfercept.models.model import param_bytes
from jinfercept.models.rope import frequencies, rotate
from tests.support.dense_model import logits
from tests.support.tiny_model import set_joined

GOLDEN = Path(__file__).parent.parent / "golden"
VARIANTS = json.loads((GOLDEN / "variants.json").read_text())
QUICK = ("attention_bias and mlp_bias", "longrope of phi3 beyond the original length", "tied, with another head stored")


def config_of(base: str) -> dict[str, Any]:
    return json.loads((GOLDEN / base / "config.json").read_text())


def changed(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config of a golden checkpoint with changes, of which null removes a key."""
    return {key: value for key, value in (config_of(base) | changes).items() if changes.get(key, value) is not None}


def write(base: str, directory: Path, changes: dict[str, Any], added: dict[str, list[int]]) -> Path:
    shutil.copytree(GOLDEN / base, directory)
    (directory / "config.json").write_text(json.dumps(changed(base, changes)))
    if added:
        tensors = load_file(directory / "model.safetensors")
        for name, shape in added.items():
            tensors[name] = np.sin(np.arange(np.prod(shape))).astype(np.float32).reshape(shape)
        save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
@pytest.mark.parametrize("joined", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_variant_has_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, joined: bool
) -> None:
    set_joined(monkeypatch, joined)
    variant = VARIANTS[name]
    directory = write(variant["base"], tmp_path / "model", variant["changes"], variant["added"])
    tokens = np.load(GOLDEN / f"{variant['base']}.npz")["tokens_1"]
    loaded = load(directory, dtype="float32").for_length(len(tokens))
    ours = logits(loaded.model, loaded.params, tokens)[-1]
    np.testing.assert_allclose(ours[: len(variant["logits"])], variant["logits"], atol=1e-4, rtol=0)


def test_a_head_that_is_stored_beside_its_tied_embedding_is_one_array_if_it_is_the_same(tmp_path: Path) -> None:
    directory = write("llama_tied", tmp_path / "model", {}, {})
    tensors, file = load_file(directory / "model.safetensors"), directory / "model.safetensors"
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding}, file)
    same = load(directory, dtype="float32")
    assert same.model.config.tie_embeddings
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding}, file)
    alone = load(directory, dtype="float32")
    assert alone.params.head["unembed"] is alone.params.embed["embedding"]
    np.testing.assert_array_equal(alone.params.embed["embedding"], same.params.embed["embedding"])


def test_memory_counts_a_head_that_is_not_tied(tmp_path: Path) -> None:
    directory = write("llama_tied", tmp_path / "model", {}, {"lm_head.weight": [128, 32]})
    config = load(directory, dtype="float32").model.config
    assert not config.tie_embeddings
    assert bytes_to_load(directory, "float32") == param_bytes(config, "float32")


def test_longrope_serves_the_original_length_with_its_short_factors_and_longer_sequences_with_its_long_ones() -> None:
    variant = VARIANTS["longrope"]
    config = config_from_hf(changed(variant["base"], variant["changes"]))
    assert (config.max_position, config.rope.factors) == (64, (1.0, 1.5, 2.0, 2.5))
    assert config.for_length(64) == config.for_length(None) == config
    longer = config.for_length(65)
    assert (longer.max_position, longer.rope.factors) == (128, (2.0, 3.0, 4.0, 5.0))


def test_dynamic_has_the_numbers_of_its_longest_sequence_where_sequences_are_longer_than_the_models() -> None:
    variant = VARIANTS["dynamic"]
    config = config_from_hf(changed(variant["base"], variant["changes"])).for_length(200)
    assert config.max_position == 256
    pairs = np.arange(0, 16, 2) / 16
    base = 500.0 * (2.0 * 256 / 128 - (2.0 - 1)) ** (16 / 14)  # `_compute_dynamic_ntk_parameters` of transformers
    np.testing.assert_allclose(frequencies(config.rope), base**-pairs, rtol=1e-6)


def test_layers_of_smollm3_that_turn_nothing_are_the_windowed_ones() -> None:
    config = config_of("smollm3") | {"layer_types": None}
    assert [kind.rope is None for kind in config_from_hf(config).kinds] == [True, False, True]
    config |= {"use_sliding_window": True, "sliding_window": 32, "no_rope_layers": None, "no_rope_layer_interval": 3}
    windowed = config_from_hf(config).kinds
    assert [(kind.rope is None, kind.window) for kind in windowed] == [(True, None), (True, None), (False, 32)]


def test_values_that_are_not_there_are_those_of_transformers() -> None:
    config = config_of("mistral") | {"max_position_embeddings": 8192}
    for key in ("sliding_window", "rms_norm_eps", "num_key_value_heads", "hidden_act", "tie_word_embeddings"):
        config.pop(key, None)
    read = config_from_hf(config | {"num_attention_heads": 8})
    assert (read.kind(0).window, read.norm_eps, read.num_kv_heads, read.tie_embeddings) == (4096, 1e-6, 8, False)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("llama_gqa", {"architectures": ["LLaMAForCausalLM"]}),
        ("llama_gqa", {"architectures": ["LlamaModel"]}),
        ("llama_gqa", {"architectures": None}),
        ("llama_gqa", {"model_type": None}),
        ("llama_gqa", {"a_note": "of its author", "unsloth_fixed": True, "use_mrope": False, "pretraining_tp": 4}),
        ("llama_gqa", {"attention_dropout": 0.1, "use_flash_attention_2": True, "output_attentions": True}),
        ("llama_gqa", {"rope_scaling": None, "is_causal": True, "logit_scale": 1.0, "final_logit_softcapping": None}),
        ("llama_gqa", {"initializer_range": 0.1, "torch_dtype": "float16", "dtype": "bfloat16", "pad_token_id": 0}),
        (
            "gptj",
            {"rotary": True, "scale_attn_weights": True, "summary_activation": "x", "activation_function": "gelu_fast"},
        ),
        ("gptj", {"hidden_size": 32, "num_hidden_layers": 2, "attn_pdrop": 0.1}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),  # Phi-4-mini-instruct
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),  # Qwen3-Coder
    ],
)
def test_keys_that_change_nothing_are_let_be(base: str, changes: dict[str, Any]) -> None:
    assert config_from_hf(config_of(base) | changes) == config_from_hf(config_of(base))


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        ("llama_gqa", {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, "LlamaForCausalLM and model_type"),
        ("llama_gqa", {"model_type": "smallthinker"}, "smallthinker"),
        ("llama_gqa", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}}, "full_atten"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "alpha": 3}}, "alpha 3"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope_section"),

        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0]}}, "long_factor"),
        ("phi3", {"rope_scaling": {"type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ("phi3", {"resid_scale": 2.0}, "resid_scale"),

        ("granite", {"attention_multiplier": -1.0}, "attention_multiplier"),



        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),


        ("llama_gqa", {"rope_scaling": {"type": "dynamic"}}, "dynamic.*factor"),
        ("llama_gqa", {"rope_scaling": {"type": "proportional", "partial_rotary_factor": 0}}, "partial_rotary_factor"),
        ("llama_mha", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ("llama_llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0,
                                              "high_freq_factor": 1.0}}, "high_freq_factor"),
        *(
            ("llama_gqa", {key: value}, key)
            for key, value in {
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 256,
                "logit_scale": 0.0625,
                "logits_scaling": 8.0,
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.0078,
                "scale_emb": 12,
                "clip_qkv": 8.0,
                "num_local_experts": 8,
                "use_qk_norm": True,
                "is_causal": False,
                "no_rope_layers": [1, 0, 1],
                "per_layer_config": {"1": {"head_dim": 4}},
                "transformers_weights": "other.safetensors",
                "compression_config": {"format": "int-quantized"},
                "quantization": {"bits": 4, "group_size": 64},
                "mlp_bias": "yes",
                "layer_types": ["sliding_attention"] * 3,
                "vision_config": {"hidden_size": 8},
            }.items()
        ),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"use_sliding_window": "no"}, "use_sliding_window"),
        ("gptj", {"rope_theta": 500.0}, "rope_theta"),
        ("gptj", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gptj", {"hidden_size": 64}, "hidden_size 64 and n_embd 32"),
        ("gptj", {"activation_function": "relu"}, "activation_function"),
    ],
)  # fmt: skip
def test_a_key_that_could_change_the_numbers_is_refused_by_name(base: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        config_from_hf(config_of(base) | changes)


def test_rope_scaling_beside_rope_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    variant = VARIANTS["rope_scaling beside rope_parameters"]
    config_from_hf(config_of(variant["base"]) | variant["changes"])
    assert "rope_scaling counts" in caplog.text


def test_bfloat16_heads_are_turned_in_float32():
    rope = RopeConfig(theta=10_000.0, rotary_dim=4)
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    ours = rotate(x, jnp.array([4001]), rope)  # 4001 is not a bfloat16
    exact = rotate(x.astype(jnp.float32), jnp.array([4001]), rope)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))
