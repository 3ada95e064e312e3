"""What `jinfercept convert` writes: the same model, tokenizer included, whatever it came from."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.cli.main import main
from jinfercept.errors import ModelError
from jinfercept.models import embedded
from jinfercept.models.load import load, read_config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SHIPPED = [path.parent for folder in ("jinfercept", "examples") for path in (ROOT / folder).rglob("jinfercept.json")]


def same(first: object, second: object) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize(
    "name",
    [
        *("llama_tied", "qwen3_next", "gpt_oss", "gptj_published"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama_yarn", "qwen2", "gemma3", "qwen3_moe_mixed", "nemotron_h")
        ),
    ],
)
def test_a_converted_model_is_the_original(tmp_path, name, capsys):
    assert main(["convert", str(GOLDEN / name), str(tmp_path / "new"), "--dtype", "float32"]) == 0
    assert "float32" in capsys.readouterr().out
    original, converted = load(GOLDEN / name, dtype="float32"), load(tmp_path / "new", dtype="float32")
    assert converted.source == tmp_path / "new"
    assert read_config(tmp_path / "new") == original.model.config
    assert jax.tree.structure(converted.params) == jax.tree.structure(original.params)
    assert same(converted.params, original.params)


def test_the_tokenizer_comes_along(tmp_path):
    source = embedded.fetch()
    original = load_tokenizer(source)
    assert original is not None
    original.save(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert saved is not None
    text = "<|im_start|>user\n12 naïve 🙂 words<|im_end|>\n"
    assert saved.encode(text) == original.encode(text)
    assert saved.decode(saved.encode(text), skip_special_tokens=False) == text
    assert (saved.bos_token_id, saved.eos_token_ids) == (original.bos_token_id, original.eos_token_ids)
    assert saved.special_ids == original.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert saved.apply_chat_template(messages) == original.apply_chat_template(messages)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_converted_model_that_ships_loads(directory):
    assert load(directory, dtype="float32").model.config.eos_token_ids
    assert load_tokenizer(directory) is not None


def without_defaults(value):
    """A config as a version wrote it that had no field with a default."""
    if not is_dataclass(value):
        return [without_defaults(part) for part in value] if isinstance(value, tuple) else value
    kept = {field.name: getattr(value, field.name) for field in fields(value)}
    return {
        field.name: without_defaults(kept[field.name]) for field in fields(value) if kept[field.name] != field.default
    }


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_next", "qwen3_moe_mixed", "gpt_oss", "phi3"])
def test_a_config_that_lacks_fields_of_later_versions_reads_as_their_defaults(tmp_path, name):
    config = read_config(GOLDEN / name)
    (tmp_path / "jinfercept.json").write_text(json.dumps({"format": 2, "config": without_defaults(config)}))
    assert read_config(tmp_path) == config


def test_a_directory_is_not_written_twice(tmp_path, capsys):
    assert main(["convert", str(GOLDEN / "llama_gqa"), str(tmp_path)]) == 0
    assert main(["convert", str(GOLDEN / "llama_gqa"), str(tmp_path)]) == 2
    assert "holds a converted model already" in capsys.readouterr().err


def test_damage_is_named(tmp_path):
    main(["convert", str(GOLDEN / "llama_gqa"), str(tmp_path)])
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "jinfercept_tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        load_tokenizer(tmp_path)
    weights = tmp_path / "weights" / "layers.1.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"layers\.1\.safetensors is not a readable safetensors file"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"layers\.1\.attn_norm expected \[32\] got nothing"):
        load(tmp_path)
    settings = (tmp_path / "jinfercept.json").read_text()
    (tmp_path / "jinfercept.json").write_text(settings.replace('"format": 2', '"format": 7'))
    with pytest.raises(ModelError, match=r"newer version.*format 7"):
        read_config(tmp_path)
