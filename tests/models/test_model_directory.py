"""Models by hub id, without a hub: cached files are used, everything else is one clear error."""

import shutil
from pathlib import Path

import pytest

from jinfercept.errors import ModelError
from jinfercept.models.load import bytes_to_load, load, quantization_of, read_config
from jinfercept.models.model import param_bytes
from jinfercept.models.model_directory import is_hub_id

GOLDEN = Path(__file__).parent.parent / "golden"


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
