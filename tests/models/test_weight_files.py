"""Which files of a directory count, torch's own too, and which names tensors have: transformers' rules, or an error."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.errors import ModelError
from jinfercept.models.gguf_weights import GGUFCheckpoint
from jinfercept.models.hf_weights import HFCheckpoint
from jinfercept.models.load import load, quantization_of
from jinfercept.models.quantized import is_quantized
from jinfercept.models.torch_weights import TorchFile
from jinfercept.models.weight_files import SafetensorsFile
from tests.support import quantised_checkpoints as words
from tests.support import tiny_gguf

GOLDEN = Path(__file__).parent.parent / "golden"
FILE = GOLDEN / "gptj_published" / "pytorch_model.bin"


def test_tensors_are_read_by_rows_in_the_stored_dtype():
    file = TorchFile.open(FILE)
    rows = file.read("transformer.wte.weight", slice(2, 5))
    assert (rows.shape, rows.dtype) == ((3, 32), np.float16)
    assert file.read("transformer.h.0.attn.bias", slice(0, 1)).sum() == 36  # a causal mask of 8 by 8


def test_several_files_are_read_by_their_index(tmp_path):
    directory = shutil.copytree(GOLDEN / "gptj_published", tmp_path / "model")
    (directory / "pytorch_model.bin").rename(directory / "pytorch_model-00001-of-00001.bin")
    index = '{"weight_map": {"transformer.wte.weight": "pytorch_model-00001-of-00001.bin"}}'
    (directory / "pytorch_model.bin.index.json").write_text(index)
    (directory / "training_args.bin").write_bytes(b"no weights")
    assert load(directory).source == directory
    (directory / "pytorch_model-00001-of-00001.bin").unlink()
    with pytest.raises(ModelError, match="pytorch_model-00001-of-00001"):
        load(directory)


type Damage = Callable[[Path], Any]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model")


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def norm(directory: Path) -> np.ndarray:
    """A weight of the model."""
    checkpoint = HFCheckpoint.open(directory)
    return np.asarray(checkpoint.read("model.norm.weight", slice(None)), np.float32)


def save_other(directory: Path, file: str, name: str = "model.norm.weight") -> None:
    save_file({name: np.full(32, 7.0, np.float32)}, directory / file)


STORED = load_file(GOLDEN / "llama_gqa" / "model.safetensors")["model.norm.weight"].astype(np.float32)


@pytest.mark.parametrize("other", ["aaa.safetensors", "zzz.safetensors", "model.old.safetensors"])
def test_a_name_in_a_second_file_is_an_error_that_names_both(copied: Path, other: str) -> None:
    save_other(copied, other)
    with pytest.raises(ModelError, match=rf"model.norm.weight of model.safetensors and model.norm.weight of {other}"):
        load(copied)


def test_other_files_beside_the_weights_are_not_mixed_in(copied: Path) -> None:
    save_other(copied, "consolidated.safetensors")
    save_other(copied, "optimizer.safetensors", "state")
    (copied / "broken.safetensors").write_bytes(b"x")
    (copied / "pytorch_model.bin").write_bytes(b"x")
    np.testing.assert_array_equal(norm(copied), STORED)


def shards(directory: Path, *, index: bool) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {f"model-0000{1 + i % 2}-of-00002.safetensors": {} for i in range(2)}
    for i, (name, tensor) in enumerate(tensors.items()):
        files[f"model-0000{1 + i % 2}-of-00002.safetensors"][name] = tensor
    for file, names in files.items():
        save_file(names, directory / file)
    if index:
        placed = {name: file for file, names in files.items() for name in names}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def test_shards_count_with_their_index_and_without(copied: Path) -> None:
    shards(copied, index=False)
    np.testing.assert_array_equal(norm(copied), STORED)
    save_other(copied, "zzz.safetensors")
    with pytest.raises(
        ModelError, match=r"model.norm.weight of model-0000\d.* and model.norm.weight of zzz.safetensors"
    ):
        load(copied)
    (copied / "zzz.safetensors").unlink()
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="got nothing"):
        load(copied)


def test_only_the_files_of_an_index_count(copied: Path) -> None:
    shards(copied, index=True)
    save_other(copied, "zzz.safetensors")
    np.testing.assert_array_equal(norm(copied), STORED)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: name.replace(".self_attn", "._orig_mod.self_attn"),
        lambda name: f"module.{name}",
        lambda name: name.removeprefix("model."),
    ],
)
def test_names_of_wrapped_and_of_headless_models_are_understood(copied: Path, rename: Callable[[str], str]) -> None:
    rewrite(copied, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    np.testing.assert_array_equal(norm(copied), STORED)


def test_two_spellings_of_a_name_are_two_of_the_same(copied: Path) -> None:
    rewrite(copied, lambda tensors: tensors | {"_orig_mod.model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(ModelError, match="the same name"):
        load(copied)


def test_an_adapter_is_no_model(copied: Path) -> None:
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    for _ in range(2):
        with pytest.raises(ModelError, match=r"adapter \(LoRA\).*owner/base.*--lora-modules"):
            load(copied)
        (copied / "config.json").unlink(missing_ok=True)


def test_a_directory_of_gguf_files_says_which_to_name(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"name its file m\.gguf"):
        load(tmp_path)


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def directory(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def listening(file: Path) -> None:
    file.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(file.name)
    os.chdir(here)


def dead_link(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")


@pytest.mark.parametrize("make", [pipe, device, directory, listening, dead_link])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "other.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
    ],
)
def test_what_is_no_file_is_refused_before_it_is_opened(copied: Path, name: str, make: Damage) -> None:
    make(copied / name)
    with pytest.raises(ModelError, match=name):
        load(copied)
    with pytest.raises(ModelError, match=name):
        load_tokenizer(copied)


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="no such model"):
        load(tmp_path / "m.gguf")


def split(file: Path, parts: int) -> list[Path]:
    """A GGUF file in parts, as `llama-gguf-split` names them."""
    tiny_gguf.write(file)
    reader = gguf.GGUFReader(file)
    files = [file.with_name(f"m-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, path in enumerate(files):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind = field.types[0]
                writer.add_key_value(field.name, field.contents(), kind)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        for tensor in reader.tensors[i::parts]:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def test_a_split_gguf_file_is_one_model(tmp_path: Path) -> None:
    first, second, third = split(tmp_path / "whole.gguf", 3)
    whole, parts = (GGUFCheckpoint.open(file) for file in (tmp_path / "whole.gguf", first))
    assert (parts.config, parts.shapes) == (whole.config, whole.shapes)
    for name, shape in whole.shapes.items():
        rows = slice(0, shape[0])
        np.testing.assert_array_equal(parts.read(name, rows), whole.read(name, rows))
    with pytest.raises(ModelError, match=r"part 1 of 3.*-00001-of-00003\.gguf"):
        load(second)
    third.unlink()
    with pytest.raises(ModelError, match=r"parts of the model are missing; got m-00003-of-00003\.gguf"):
        load(first)


def as_plain(directory: Path) -> None:
    """Quantised weights are those of the folder `plain`."""
    checkpoint, expected = HFCheckpoint.open(directory), load_file(directory / "plain" / "model.safetensors")
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in expected.items()}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name, slice(0, len(tensor))), tensor)


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def test_a_quantised_head_is_read(tmp_path: Path) -> None:
    how = words.KINDS["gptq"] | {"lm_head": True}
    plain = words.write(tmp_path, how)
    tensors, weight = words.quantised_layer(np.random.default_rng(1), words.E, words.V, how)

    def replaced(stored: dict[str, np.ndarray], head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"} | head

    rewrite(tmp_path, lambda stored: replaced(stored, {f"lm_head.{part}": tensor for part, tensor in tensors.items()}))
    rewrite(plain, lambda stored: replaced(stored, {"lm_head.weight": weight}))
    as_plain(tmp_path)
    head = load(tmp_path, dtype="float32").params.head["unembed"]
    assert is_quantized(head)
    np.testing.assert_array_equal(head.dense(), weight)


def test_how_words_are_stored_may_be_told_apart(tmp_path: Path) -> None:
    words.write(tmp_path, words.KINDS["gptq"])
    config = config_of(tmp_path)
    how = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"nothing says in which; got .*qweight.*quantize_config.json"):
        load(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({key: how[key] for key in how if key != "quant_method"}))
    assert quantization_of(tmp_path) == "gptq"
    as_plain(tmp_path)


def test_words_of_autoawq_may_be_told_apart(tmp_path: Path) -> None:
    words.write(tmp_path, words.KINDS["awq"])
    config = config_of(tmp_path)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = {"w_bit": 4, "q_group_size": words.GROUP, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(how))
    as_plain(tmp_path)


def test_a_note_about_words_beside_plain_weights_means_nothing(copied: Path) -> None:
    (copied / "quantize_config.json").write_text('{"bits": 3}')
    np.testing.assert_array_equal(norm(copied), STORED)
    assert quantization_of(copied) is None


def test_layers_that_dynamic_leaves_out_are_plain(tmp_path: Path) -> None:
    how = words.KINDS["gptq"] | {"dynamic": {"-:.*self_attn.q_proj.*": {}}}
    outside = load_file(words.write(tmp_path, how) / "model.safetensors")
    rewrite(tmp_path, lambda stored: plain_instead(stored, outside, "q_proj"))
    as_plain(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert packed_without_weights(tmp_path) == {"q_proj": False, "k_proj": True}


def test_layers_that_a_regular_expression_leaves_out_are_plain(tmp_path: Path) -> None:
    outside = load_file(words.write(tmp_path, words.KINDS["fp8, blocks"]) / "model.safetensors")
    how = words.COMPRESSED | {"ignore": ["lm_head", "re:.*q_proj"]}
    how["config_groups"] = {"group_0": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [16, 32]}}}
    (tmp_path / "config.json").write_text(json.dumps(words.CONFIG | {"quantization_config": how}))
    file = tmp_path / "model.safetensors"
    words.write_safetensors(plain_instead(tensors_of(file), outside, "q_proj"), file)
    as_plain(tmp_path)
    file.unlink()
    assert packed_without_weights(tmp_path) == {"q_proj": False, "k_proj": True}


def plain_instead(stored: dict[str, np.ndarray], plain: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """Tensors with unquantised ones for the layers of a name."""
    rest = {name: tensor for name, tensor in stored.items() if part not in name}
    return rest | {name: tensor for name, tensor in plain.items() if part in name}


def packed_without_weights(directory: Path) -> dict[str, bool]:
    """Which layers are quantised by the config alone."""
    checkpoint = HFCheckpoint.open(directory)
    names = {name: f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj")}
    return {name: checkpoint.packing(stored) is not None for name, stored in names.items()}


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    opened = SafetensorsFile.open(file)
    return {name: np.asarray(opened.read(name, slice(None))) for name in opened.shapes}


def without(*parts: str) -> Damage:
    """Takes tensors out whose names end so."""

    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        words.write_safetensors(
            {name: tensor for name, tensor in tensors_of(file).items() if not name.endswith(parts)}, file
        )

    return change


def reshaped(part: str, change_one: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Changes tensors whose names end so."""

    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = tensors_of(file)
        words.write_safetensors(
            {name: change_one(tensor) if name.endswith(part) else tensor for name, tensor in tensors.items()}, file
        )

    return change


@pytest.mark.parametrize(
    ("kind", "damage", "named"),
    [
        ("gptq", without("q_proj.scales"), "no model.layers.0.self_attn.q_proj.scales"),
        ("gptq", without("q_proj.qzeros"), "qzeros"),
        ("gptq", reshaped("q_proj.qweight", lambda words: words.astype(np.float32)), "q_proj.qweight .* of float32"),
        ("gptq", reshaped("q_proj.qweight", lambda words: words.reshape(-1)), "q_proj.qweight"),
        ("gptq", reshaped("q_proj.scales", lambda scales: scales[:1]), "number of groups"),
        ("awq", without("k_proj.qzeros", "k_proj.scales"), "k_proj.qzeros, model"),
        ("fp8, a tensor", without("q_proj.weight_scale"), "no model.layers.0.self_attn.q_proj.weight_scale"),
        ("fp8, blocks", without("weight_scale_inv"), "no model.layers.0"),
        ("fp8, outputs", reshaped("q_proj.weight_scale", lambda scales: scales[:3]), r"q_proj.weight_scale \[3, 1\]"),
        ("fp8, blocks", reshaped("q_proj.weight_scale_inv", lambda scales: scales[:1]), r"weight_scale_inv \[1, 2\]"),
    ],
)
def test_quantised_weights_without_a_part_are_named(tmp_path: Path, kind: str, damage: Damage, named: str) -> None:
    words.write(tmp_path, words.KINDS[kind])
    damage(tmp_path)
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dynamic": {r"+:.*\.0\..*": {"bits": 8}}}, r"dynamic.*bits and groups of their own; got \+:"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2; got 'marlin'"),
    ],
)
def test_words_of_several_kinds_are_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    words.write(tmp_path, words.KINDS["gptq"], **changed)
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_the_patterns_of_dynamic_are_regular_expressions(tmp_path: Path) -> None:
    words.write(tmp_path, words.KINDS["gptq"], dynamic={"-:(": {}})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no regular expression"):
        packed_without_weights(tmp_path)
