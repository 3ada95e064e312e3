"""Damaged model files: loading one is an error that says what, got and fix."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfercept.chat.tokenizer.gguf import read_vocab
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.errors import ModelError
from jinfercept.models.hf_weights import read_config
from jinfercept.models.load import load
from tests.support.sample_tokenizers import backend_of
from tests.support.scripted_model import byte_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
NUMBERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 31,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "8",
    [],
    [[1]],
    {},
    {"a": 1},
]


COUNTS = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])


def damaged(whole: bytes, places: range, count: int) -> Iterator[bytes]:
    """Copies of a file, each with a few bytes changed, taken out, put in, or its end cut off.

    Args:
        places: where.
    """
    choose = random.Random(len(whole))
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(choose.choice([1, 1, 2, 5])):
            at = choose.choice(places)
            match choose.randrange(6):
                case 0:
                    data[at : at + 1] = choose.randbytes(1)
                case 1:
                    data[at : at + 8] = struct.pack("<Q", choose.choice(NUMBERS))
                case 2:
                    data[at : at + 4] = struct.pack("<I", choose.choice(NUMBERS) & 0xFFFFFFFF)
                case 3:
                    del data[at : at + choose.randrange(1, 40)]
                case 4:
                    data[at:at] = choose.choice([choose.randbytes(9), data[at : at + 30]])
                case 5:
                    del data[choose.choice([at, choose.randrange(len(data) + 1)]) :]
        yield bytes(data)


def check_all(load_file: Callable[[], Any], files: Iterator[bytes], path: Path) -> None:
    """Load all of them; some have to be refused."""
    errors: list[ModelError] = []
    for data in files:
        path.write_bytes(data)
        try:
            load_file()
        except ModelError as error:
            errors.append(error)
    assert len(errors) > 20
    assert all(error.what and error.fix and len(str(error)) < 3000 for error in errors)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A GGUF file of weights and a vocabulary."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "embedding_length": 8,
        "block_count": 1,
        "attention.head_count": 2,
        "context_length": 16,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", "▁a", "aa"])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((8, 8), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm", "rope_freqs"):
        writer.add_tensor(f"{name}.weight", np.ones(2 if name == "rope_freqs" else 8, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((7, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@COUNTS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_damaged_gguf_file_is_a_model_error(tiny: Path, count: int) -> None:
    assert load(tiny).source == tiny
    whole = tiny.read_bytes()
    head = range(whole.index(b"output_norm.weight") + 500)
    check_all(lambda: load(tiny), damaged(whole, head, count), tiny)
    check_all(lambda: read_vocab(tiny), damaged(whole, range(whole.index(b"blk.0")), count), tiny)


@COUNTS
def test_a_damaged_torch_file_is_a_model_error(tmp_path: Path, count: int) -> None:
    folder = shutil.copytree(GOLDEN / "gptj_published", tmp_path / "model")
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    start, directory = whole.index(b"\x80\x02"), whole.index(b"PK\x01\x02")
    check_all(lambda: load(folder), damaged(whole, range(start, start + 3000), count), path)
    check_all(lambda: load(folder), damaged(whole, range(directory, len(whole)), count), path)


@COUNTS
def test_a_damaged_safetensors_file_is_a_model_error(tmp_path: Path, count: int) -> None:
    folder = shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    check_all(lambda: load(folder), damaged(whole, range(8 + struct.unpack("<Q", whole[:8])[0]), count), path)


def in_config(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def in_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def in_tensors(**changes: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], Any]:
    """Changes tensors, or takes them out; a name's dots are written `__`."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for key, change_one in changes.items():
            name = key.replace("__", ".")
            changed = change_one(tensors.pop(name, np.zeros(3, np.float32)))
            tensors |= {} if changed is None else {name: changed}
        save_file(tensors, folder / "model.safetensors")

    return change


def index(text: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


WHOLE, REFUSED = True, False
DAMAGES: dict[str, tuple[bool, Callable[[Path], Any]]] = {
    "config cut": (REFUSED, in_file("config.json", lambda data: data[:-20])),
    "config with a mark": (REFUSED, in_file("config.json", lambda data: b"\xef\xbb\xbf" + data)),
    "config of NaN": (REFUSED, in_config(rms_norm_eps=float("nan"))),
    "config of text": (REFUSED, in_config(num_hidden_layers="3")),
    "architectures of text": (WHOLE, in_config(architectures="LlamaForCausalLM")),
    "quantization_config of text": (REFUSED, in_config(quantization_config="gptq")),
    "quantised, but plain": (WHOLE, in_config(quantization_config={"quant_method": "fp8"})),
    "tied, but not": (WHOLE, in_config(tie_word_embeddings=True)),
    "one layer more": (REFUSED, in_config(num_hidden_layers=4)),
    "other heads": (REFUSED, in_config(num_key_value_heads=4)),
    "other window": (REFUSED, in_config(layer_types=["chunked_attention"] * 3)),
    "biases that are not there": (REFUSED, in_config(attention_bias=True)),
    "weights cut in the header": (REFUSED, in_file("model.safetensors", lambda data: data[:100])),
    "weights cut in the numbers": (REFUSED, in_file("model.safetensors", lambda data: data[:-1])),
    "weights longer": (REFUSED, in_file("model.safetensors", lambda data: data + b"1")),
    "a header of any length": (REFUSED, in_file("model.safetensors", lambda data: b"\xff" * 8 + data[8:])),
    "a pointer of git-lfs": (
        REFUSED,
        in_file("model.safetensors", lambda data: b"version https://git-lfs.github.com/"),
    ),
    "a scalar": (REFUSED, in_tensors(model__norm__weight=lambda tensor: np.array(1, np.float32))),
    "a tensor turned": (REFUSED, in_tensors(model__layers__0__mlp__up_proj__weight=lambda tensor: tensor.T.copy())),
    "whole numbers": (REFUSED, in_tensors(model__norm__weight=lambda tensor: tensor.astype(np.int32))),
    "other floats": (WHOLE, in_tensors(model__norm__weight=lambda tensor: tensor.astype(np.float64))),
    "a tensor less": (REFUSED, in_tensors(lm_head__weight=lambda tensor: None)),
    "a tensor more": (REFUSED, in_tensors(model__layers__0__self_attn__sinks=lambda tensor: tensor)),
    "an index of nothing": (REFUSED, index("")),
    "an index without names": (REFUSED, index('{"weight_map": {}}')),
    "an index of no files": (REFUSED, index('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')),
    "an index of the file": (WHOLE, index('{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}')),
    "end tokens of text": (REFUSED, in_file("generation_config.json", lambda data: b'{"eos_token_id": "2"}')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_a_model_error_or_the_same_model(tmp_path: Path, damage: str) -> None:
    is_whole, change = DAMAGES[damage]
    folder = shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model")
    change(folder)
    if not is_whole:
        with pytest.raises(ModelError) as caught:
            load(folder)
        assert caught.value.what
        assert caught.value.fix
        assert len(str(caught.value)) < 5000
        return
    loaded = load(folder, dtype="float32")
    assert loaded.model.config == read_config(GOLDEN / "llama_gqa")
    for name, tensor in load_file(GOLDEN / "llama_gqa" / "model.safetensors").items():
        ours = {"model.norm.weight": "norm", "lm_head.weight": "unembed"}.get(name)
        if ours:
            np.testing.assert_array_equal(loaded.params.head[ours], tensor.astype(np.float32))


def test_a_damaged_config_is_a_model_error(tmp_path: Path) -> None:
    for name in ("llama_yarn", "gptj"):
        for file in ("config.json", "generation_config.json"):
            directory = tmp_path / f"{name}-{file}"
            directory.mkdir()
            shutil.copy(GOLDEN / name / "config.json", directory)
            shutil.copy(GOLDEN / name / "generation_config.json", directory)
            path, config = directory / file, json.loads((directory / file).read_text())
            rope = config.get("rope_parameters") or {}
            wrong = [config | {key: value} for key in config for value in VALUES]
            wrong += [config | {"rope_parameters": rope | {key: value}} for key in rope for value in VALUES]
            refused = 0
            for content in [*VALUES, *wrong]:
                path.write_text(json.dumps(content))
                try:
                    hash(read_config(directory))
                except ModelError:
                    refused += 1
            assert refused > 10
            for text in (b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"", b"{"):
                path.write_bytes(text)
                with pytest.raises(ModelError, match=file):
                    read_config(directory)


def test_a_damaged_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    backend_of(byte_tokenizer(None)).save(str(tmp_path / "tokenizer.json"))
    for name, texts in {
        "tokenizer_config.json": ["[]", "{", "7", '{"tokenizer_class": 7}', '{"eos_token": {"a": []}}'],
        "generation_config.json": ["[]", "{", '{"eos_token_id": [[1]]}', '{"eos_token_id": "x"}', "[" * 100_000],
        "tokenizer.json": ["", "[]", "{}", '{"model": {}}', "\x00" * 100],
    }.items():
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for text in texts:
            (tmp_path / name).write_text(text)
            with pytest.raises(ModelError, match="tokenizer"):
                load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


def test_damaged_settings_of_a_converted_tokenizer_are_a_model_error(tmp_path: Path) -> None:
    byte_tokenizer("{{ messages }}").save(tmp_path)
    path = tmp_path / "jinfercept_tokenizer.json"
    settings = json.loads(path.read_text())
    for wrong in (
        {"chat_templates": {"default": 7}},
        {"special_tokens": {"bos_token": []}},
        {"eos_token_ids": ["a"]},
        {"a": 1},
    ):
        path.write_text(json.dumps(settings | wrong))
        with pytest.raises(ModelError, match="convert the model again"):
            load_tokenizer(tmp_path)
