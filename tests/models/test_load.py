"""Finding, checking, placing and joining weights; random weights; memory sums."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.errors import ModelError
from jinfercept.models.load import bytes_to_load, load, quantization_of, read_config
from jinfercept.models.model import kv_bytes_per_token, param_bytes
from jinfercept.models.model_directory import is_hub_id
from tests.support.tiny_model import GOLDEN, set_joined


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model")


def _rewrite(directory: Path, **changes: np.ndarray | None) -> None:
    """Replace, add or (with None) remove tensors; a name's dots are written `__`."""
    tensors = load_file(directory / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


def test_what_is_not_there_is_answered_with_what_a_model_can_be():
    with pytest.raises(ModelError, match=r"no/such/model.*config.json.*gguf.*smollm2-135m"):
        load("no/such/model")


def test_auto_is_float32_on_the_cpu():
    loaded = load(GOLDEN / "llama_tied")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}
    assert loaded.source == GOLDEN / "llama_tied"


def test_a_token_takes_keys_and_values_over_all_layers():
    config = load(GOLDEN / "llama_gqa", load_format="dummy").model.config
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 3 * 2 * 8 * 2


def test_everything_wrong_with_the_tensors_is_in_one_error(copied):
    _rewrite(
        copied,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=np.zeros((3, 32), np.float32),
        model__layers__0__self_attn__q_proj__bias=np.zeros(32, np.float32),
    )
    with pytest.raises(ModelError) as error:
        load(copied)
    assert "model.norm.weight expected [32] got nothing" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight expected [64, 32] got [3, 32]" in str(error.value)
    assert "model.layers.0.self_attn.q_proj.bias not expected" in str(error.value)


def test_layers_of_glm_that_draft_are_left_out_and_corrections_of_routers_keep_their_digits(tmp_path: Path) -> None:
    directory = shutil.copytree(GOLDEN / "glm4_moe", tmp_path / "model")
    name, correction = "model.layers.1.mlp.gate.e_score_correction_bias", np.linspace(7.0, 7.01, 8, dtype=np.float32)
    extra = np.zeros(32, np.float32)
    save_file(
        load_file(directory / "model.safetensors") | {name: correction, "model.layers.3.enorm.weight": extra},
        directory / "model.safetensors",
    )
    loaded = load(directory, dtype="bfloat16")
    np.testing.assert_array_equal(loaded.params.layers[1]["router_correction"], correction)
    _rewrite(directory, model__layers__1__other=extra)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.other not expected"):
        load(directory)


def test_only_the_files_of_the_index_are_read(tmp_path):
    directory = shutil.copytree(GOLDEN / "llama_llama3", tmp_path / "model")
    save_file({"other": np.zeros(1, np.float32)}, directory / "consolidated.safetensors")
    assert load(directory).source == directory
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load(directory)


@pytest.mark.parametrize("named", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", 7])
def test_an_index_names_files_beside_it(tmp_path, named):
    directory = shutil.copytree(GOLDEN / "llama_llama3", tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": named}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"outside its directory|no weight_map"):
        load(directory)


def test_a_directory_without_config_or_weights_says_which(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="load_format=dummy"):
        load(copied)
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(copied)


def test_dummy_weights_need_only_a_config_and_repeat_by_seed(copied):
    (copied / "model.safetensors").unlink()
    first = load(copied, dtype="float32", load_format="dummy", seed=3)
    same = load(first.model.config, dtype="float32", load_format="dummy", seed=3)
    other = load(first.model.config, dtype="float32", load_format="dummy", seed=4)
    assert (first.source, same.source) == (copied, None)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first.params, same.params))
    assert not (first.params.head["unembed"] == other.params.head["unembed"]).any()
    assert not (first.params.layers[0]["o"] == first.params.layers[1]["o"]).any()


def test_a_config_alone_cannot_be_loaded():
    config = load(GOLDEN / "llama_gqa", load_format="dummy").model.config
    with pytest.raises(ModelError, match="load_format=dummy"):
        load(config)


@pytest.mark.parametrize("inner", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_gemma_that_reads_images_is_served(tmp_path: Path, inner: str) -> None:
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    tied = text.pop("tie_word_embeddings")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    whole |= {"vision_config": {"num_hidden_layers": 2}, "mm_tokens_per_image": 4, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"eos_token_id": [1, 106]}))
    tensors = load_file(GOLDEN / "gemma3" / "model.safetensors")
    renamed = {name.replace("model.", inner, 1): tensor for name, tensor in tensors.items()}
    outside = "model." if inner.startswith("model.") else ""
    others = (
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    )
    save_file(renamed | {outside + name: np.ones(2, np.float32) for name in others}, tmp_path / "model.safetensors")
    given, expected = load(tmp_path, dtype="float32"), load(GOLDEN / "gemma3", dtype="float32")
    assert given.model.config == replace(expected.model.config, eos_token_ids=(1, 106))
    jax.tree.map(np.testing.assert_array_equal, given.params, expected.params)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_joined(monkeypatch, False)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache with one repository, and no connection."""
    repository = tmp_path / "models--tiny--llama"
    shutil.copytree(GOLDEN / "llama_gqa", repository / "snapshots" / "0" / "")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    (repository / "refs" / "half").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub")
def test_a_repository_in_the_cache_needs_no_connection():
    loaded = load("tiny/llama", dtype="float32")
    assert loaded.source is not None
    assert loaded.source.parts[-3:] == ("models--tiny--llama", "snapshots", "0")
    assert read_config("tiny/llama") == read_config("tiny/llama@half") == loaded.model.config


@pytest.mark.usefixtures("hub")
def test_a_config_is_read_before_the_weights_are_there(tmp_path):
    snapshot = tmp_path / "models--tiny--llama" / "snapshots" / "0"
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    config = read_config("tiny/llama")
    assert (config.num_layers, quantization_of("tiny/llama")) == (3, None)
    assert bytes_to_load("tiny/llama", "float32") == param_bytes(config, "float32")
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        load("tiny/llama")


@pytest.mark.usefixtures("hub")
def test_a_repository_that_cannot_be_reached_says_so():
    with pytest.raises(ModelError, match=r"cannot be downloaded.*tiny/other.*fix: check the name"):
        load("tiny/other")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("EleutherAI/gpt-j-6b@float16", True),
        ("model", False),
        ("a/b/c", False),
        ("./model", False),
        ("~/model", False),
        ("/m", False),
    ],
)
def test_an_id_is_an_owner_and_a_name(name, is_id):
    assert is_hub_id(name) is is_id
