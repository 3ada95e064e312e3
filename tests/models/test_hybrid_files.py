"""Checkpoints of Qwen3-Next, Qwen3.5 and Nemotron-H: parts that text does not need, and configs that cannot be."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.load import load
from jinfercept.models.stored_rows import rows_in
from tests.support.dense_model import logits
from tests.support.quantised_checkpoints import KINDS, quantised_layer, write_safetensors
from tests.support.tiny_model import GOLDEN, set_joined

GROUPS, BIASES = ("n_group", "topk_group", "n_shared_experts"), ("attention_bias", "mlp_bias", "use_bias")


def stored(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_the_text_part_of_a_model_that_reads_images_is_served(tmp_path: Path) -> None:
    text = stored("qwen3_5") | {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    tied = text.pop("tie_word_embeddings")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    whole |= {"vision_config": {"depth": 2}, "image_token_id": 7, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {name: np.ones((2, 2), np.float32) for name in ("model.visual.blocks.0.proj.weight", "mtp.fc.weight")}
    save_file(renamed | others, tmp_path / "model.safetensors")
    given, expected = load(tmp_path, dtype="float32"), load(GOLDEN / "qwen3_5", dtype="float32")
    assert given.model.config == expected.model.config
    jax.tree.map(np.testing.assert_array_equal, given.params, expected.params)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("joined", [False, True])
def test_weights_may_be_joined(name: str, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, joined)
    loaded, golden = load(GOLDEN / name, dtype="float32"), np.load(GOLDEN / f"{name}.npz")
    assert loaded.model.joined == joined
    ours = logits(loaded.model, loaded.params, golden["tokens_1"])
    np.testing.assert_allclose(ours, golden["logits_1"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layers with attention and recurrent ones"),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types of the config"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "value heads of recurrent layers must divide evenly"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "num_taps is a whole number from 2 on"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size of the config"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate of config.json is not supported"),
        ("qwen3_5", {"num_experts": 4}, "not understood"),
        ("nemotron_h", {"layers_block_type": ["full_attention", "mlp"]}, "layers with attention and recurrent ones"),
        ("nemotron_h", {"layers_block_type": ["moe", "linear_attention"]}, "layers with attention and recurrent ones"),
        ("nemotron_h", {"num_hidden_layers": 52}, "num_hidden_layers of config.json is not supported; got 52"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act .* a model with relu2"),
        ("nemotron_h", {"n_groups": 3}, "value heads of recurrent layers must divide evenly"),
        ("nemotron_h", {"mamba_ssm_scale": 2}, "not understood"),
        *(("nemotron_h", {key: 2 if key in GROUPS else True}, f"{key} of config.json") for key in (*GROUPS, *BIASES)),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_from_hf(stored(name) | changes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda z: z[:, :-1].copy(), r"in_proj_qkvz.weight expected .* got nothing"),
        (lambda z: np.float32(1), r"in_proj_qkvz.weight expected .* got nothing"),
        (lambda z: z.astype(np.int8), r"have one type of numbers; got .*int8 in .*in_proj_qkv.weight"),
    ],
)
def test_parts_of_a_weight_that_do_not_fit_each_other_are_refused(tmp_path: Path, changed: Any, words: str) -> None:
    tensors = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    save_file(tensors | {name: np.asarray(changed(tensors[name]))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stored("qwen3_5")))
    with pytest.raises(ModelError, match=words):
        load(tmp_path, dtype="float32")


def test_a_published_nemotron_names_its_layers_by_letters_and_its_tensors_by_numbers_of_parts(tmp_path: Path) -> None:
    config = stored("nemotron_h")
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "*EMM-", "num_hidden_layers": 5, "norm_eps": 1e-5, "rope_theta": 10000}
    config |= {"time_step_limit": [0.0, float("inf")], "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "nemotron_h" / "model.safetensors")
    assert {"backbone.layers.1.mixer.experts.7.up_proj.weight", "backbone.norm_f.weight"} <= tensors.keys()
    save_file(tensors | {"mtp.layers.0.norm.weight": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    given, expected = load(tmp_path, dtype="float32"), load(GOLDEN / "nemotron_h", dtype="float32")
    assert given.model.config == expected.model.config
    jax.tree.map(np.testing.assert_array_equal, given.params, expected.params)


def test_rows_of_a_single_key_head_are_read_from_the_tensors_that_have_them() -> None:
    config = config_from_hf(stored("qwen3_5") | {"linear_num_key_heads": 1, "linear_num_value_heads": 3})
    layer = "model.layers.0.linear_attn."
    rows = rows_in({f"{layer}in_proj_{part}.weight": (3, 32) for part in "ba"}, config, {})
    spans = rows[f"{layer}in_proj_ba.weight"].spans(slice(1, 6))
    assert spans == [(f"{layer}in_proj_b.weight", slice(1, 3)), (f"{layer}in_proj_a.weight", slice(0, 3))]


@pytest.mark.parametrize(
    ("model", "kind", "parts"),
    [
        ("qwen3_5", "fp8, blocks", ("in_proj_qkv", "in_proj_z", "out_proj")),
        ("qwen3_5", "fp8, outputs", ("in_proj_qkv", "in_proj_z", "out_proj")),
        ("qwen3_5", "fp8, blocks", ("in_proj_qkv",)),
        ("nemotron_h", "fp8, modelopt", ("in_proj", "out_proj", "up_proj")),
    ],
)
def test_recurrent_layers_may_be_quantised_whole_or_in_part(
    tmp_path: Path, model: str, kind: str, parts: tuple[str, ...]
) -> None:
    rng, config = np.random.default_rng(0), stored(model)
    quantised, plain = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in load_file(GOLDEN / model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        tensors = {"weight": tensor.astype(np.float32)}
        if layer.endswith(parts):
            outputs, inputs = tensor.shape
            tensors, tensor = quantised_layer(rng, inputs, outputs, KINDS[kind])
        plain[name] = tensor.astype(np.float32)
        quantised |= {f"{layer}.{part}" if name != layer else name: each for part, each in tensors.items()}
    given = []
    for folder, tensors, more in (("q", quantised, {"quantization_config": KINDS[kind]}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        write_safetensors(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        loaded = load(tmp_path / folder, dtype="float32")
        given.append(logits(loaded.model, loaded.params, np.arange(3, 23)))
    np.testing.assert_allclose(*given, atol=1e-4)


def test_experts_may_be_stored_in_several_types(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "qwen3_next" / "model.safetensors")
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors.items() if ".up_proj." in name}
    save_file(tensors | halves, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stored("qwen3_next")))
    given, expected = load(tmp_path, dtype="float32"), load(GOLDEN / "qwen3_next", dtype="float32")
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-3), given.params, expected.params
    )
