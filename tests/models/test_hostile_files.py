"""Hostile model files: loading one runs nothing of it, takes little memory, and is an error that says what, got and fix."""

import json
import pickle
import resource
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest

from jinfercept.chat.tokenizer.gguf import read_vocab
from jinfercept.errors import ModelError
from jinfercept.models import torch_weights
from jinfercept.models.gguf_weights import GGUFCheckpoint
from jinfercept.models.torch_weights import TorchFile
from jinfercept.models.weight_files import SafetensorsFile


class Hostile:
    def __init__(self, *made: Any) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return self.made


def archive(path: Path, described: bytes, *, compressed: bool = False) -> None:
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("archive/data.pkl", described)
        file.writestr("archive/data/0", bytes(64))


def tensor(shape: str, strides: str, offset: str = "K\x00", key: str = "0") -> bytes:
    """A pickle of one tensor; numbers are pickled ones."""
    name = f"X{chr(len(key))}\0\0\0{key}"
    storage = f"(X\x07\0\0\0storagectorch\nFloatStorage\n{name}X\x03\0\0\0cpuK\x10tQ"
    rebuilt = f"ctorch._utils\n_rebuild_tensor_v2\n({storage}{offset}{shape}{strides}\x89}}tR"
    return f"\x80\x02}}X\x01\0\0\0w{rebuilt}s.".encode("latin-1")


SHAPE, STRIDES = "K\x02K\x04\x86", "K\x04K\x01\x86"


def test_a_tensor_is_where_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    archive(path, tensor(SHAPE, STRIDES))
    assert TorchFile.open(path).read("w", slice(0, 2)).shape == (2, 4)


@pytest.mark.parametrize(
    ("described", "complaint"),
    [
        (tensor("\x8a\x08" + "\xff" * 7 + "\x7fK\x04\x86", STRIDES), "has no shape"),
        (tensor("J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", "K\x00K\x00\x86"), "is larger than its data"),
        (tensor(SHAPE, "J\xfc\xff\xff\xffK\x01\x86"), "has no shape"),
        (tensor(SHAPE, STRIDES, offset="J\xf0\xff\xff\xff"), "has no shape"),
        (tensor(SHAPE, STRIDES, offset="K\x09"), "is larger than its data"),
        (tensor(SHAPE, "K\x01\x85"), "has no shape"),
        (tensor("X\x02\0\0\0ab", STRIDES), "has no shape"),
        (tensor(SHAPE, STRIDES, key="7"), "has no data"),
        (b"\x80\x02}K\x01K\x02s.", "other things than names"),
        (b"\x80\x02]" + b"r\xff\xff\xff\x7f" * 4 + b".", "instead of a dictionary"),
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "torch weights"),  # a bytearray of any length
        (b"\x80\x02)" + b"\x85" * 100_000 + b"}q\x00h\x00K\x01s.", "other things than names"),
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", "os.system is no part of a tensor"),
        (b"\x80\x02cbuiltins\neval\n.", "builtins.eval is no part"),
        (b"\x80\x02c" + b"a" * 1_000_000 + b"\nb\n.", "aaa"),
        (b"\x80\x02\x82\x01.", "torch weights"),  # an extension's code
        (pickle.dumps({"w": Hostile(print, ("run",))}), "builtins.print is no part"),
        (pickle.dumps({"w": Hostile(type, ("A", (), {}))}), "builtins.type is no part"),
        (pickle.dumps({"w": b"bytes"}, protocol=4), "torch weights"),
        (b"cos\nsystem\n(S'id'\ntR.", "os.system is no part"),
    ],
    ids=range(20),
)
def test_a_pickle_of_anything_else_is_refused_and_not_run(
    tmp_path: Path, described: bytes, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pytorch_model.bin"
    archive(path, described)
    tracemalloc.start()
    with pytest.raises(ModelError, match=complaint) as caught:
        TorchFile.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert len(str(caught.value)) < 1000
    assert capsys.readouterr().out == ""


def test_building_a_known_object_changes_nothing_of_it(tmp_path: Path) -> None:
    """BUILD would set attributes of what is let through: of a function, for all later files."""
    path = tmp_path / "pytorch_model.bin"
    state = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\0\0\0evilK\x01sb0" + tensor(SHAPE, STRIDES)[2:]
    archive(path, state)
    assert TorchFile.open(path).shapes == {"w": (2, 4)}
    assert not hasattr(torch_weights._rebuild, "evil")


def test_an_archive_that_unpacks_to_much_is_refused_packed(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    archive(path, bytes(50 << 20), compressed=True)
    tracemalloc.start()
    with pytest.raises(ModelError, match="is compressed"):
        TorchFile.open(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_safetensors_file_larger_than_the_address_space_is_refused(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 64 << 30
    described = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(described)) + described)
    with path.open("r+b") as file:
        file.truncate(8 + len(described) + size)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (16 << 30), before[1]))
    try:
        with pytest.raises(ModelError, match=r"than the memory that this process may have; got 687194\d{5} bytes"):
            SafetensorsFile.open(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert SafetensorsFile.open(path).shapes == {"w": (size,)}


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def header(*pairs: bytes, tensors: int = 0, keys: int | None = None, more: bytes = b"") -> bytes:
    count = len(pairs) if keys is None else keys
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(pairs) + more


def array(kind: int, length: int) -> bytes:
    return struct.pack("<IQ", kind, length)


@pytest.mark.parametrize(
    "data",
    [
        header(keys=1 << 63),
        header(tensors=1 << 40, more=bytes(4096)),
        header(key("a", 9, array(0, 1 << 62))),
        header(key("a", 9, array(12, 1 << 34)), more=bytes(4096)),
        header(key("a", 9, array(8, 1 << 40)), more=bytes(1 << 20)),
        header(key("a", 9, array(9, 1) * 100_000)),
        header(key("a", 8, struct.pack("<Q", 1 << 63))),
        header(key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")),
        header(key("a", 99, b"")),
        header(key("general.alignment", 4, struct.pack("<I", 0))),
        header(key("general.alignment", 8, struct.pack("<Q", 2) + b"32")),
        header(tensors=1, more=struct.pack("<QcI", 1, b"t", 1 << 31) + bytes(1 << 16)),
        header(tensors=1, more=struct.pack("<QcIQIQ", 1, b"t", 1, 4, 0, (1 << 64) - 1)),
        header(key("general.architecture", 5, struct.pack("<i", 7))),
        header(key("general.architecture", 9, array(9, 0))),
        header(),
    ],
    ids=range(16),
)
def test_a_gguf_header_of_absurd_numbers_is_refused_before_it_takes_memory(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint.open(path)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    assert len(str(caught.value)) < 1000


def test_a_gguf_vocabulary_of_wrong_types_is_refused(tmp_path: Path) -> None:
    for name, value in {
        "add_array": [
            ("tokenizer.ggml.tokens", [1, 2]),
            ("tokenizer.ggml.merges", [1]),
            ("tokenizer.ggml.scores", ["a"]),
        ],
        "add_string": [
            ("tokenizer.ggml.bos_token_id", "a"),
            ("tokenizer.ggml.tokens", "a"),
            ("tokenizer.ggml.merges", "a b"),
        ],
        "add_uint32": [("tokenizer.chat_template", 7), ("tokenizer.ggml.token_type", 7)],
    }.items():
        for given in value:
            writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
            fields = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
            for field, values in fields.items():
                if field != given[0]:
                    writer.add_array(field, values)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            getattr(writer, name)(*given)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            with pytest.raises(ModelError, match="vocabulary in this GGUF file"):
                read_vocab(tmp_path / "vocab.gguf")
