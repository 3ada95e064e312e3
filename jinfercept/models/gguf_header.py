"""Reads the header of a GGUF file in a tenth of a second: metadata, and the places of the tensors. Format: versions 2 and 3 of
the GGUF specification, little-endian.

The `gguf` package, which dequantises tensors, indexes every element of arrays: seconds for a vocabulary and its merges.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from jinfercept.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # type -> struct letter


_ALIGNMENT = "general.alignment"
_MAX_HEADER_BYTES = 256 << 20  # of large vocabularies: 10 MB
_MAX_VALUES = 16 << 20  # in all arrays together
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMENSIONS, _MAX_DEPTH = 1 << 16, 1 << 20, 4, 8


class TensorInfo(NamedTuple):
    """A stored tensor: outermost dimension first, its quantisation by number, and where its data begins in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class Header(NamedTuple):
    """Metadata (strings, numbers, and lists of them) by key, and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """The header of a GGUF file. Raises `ModelError` if the file is missing, or the header is not whole or not supported."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise ModelError(
            "the GGUF file cannot be read", got=f"{path}: {error}", fix="give the path of a GGUF file"
        ) from error
    except (struct.error, ValueError) as error:
        raise ModelError(
            "the file is not a whole GGUF file of version 2 or 3", got=f"{path}: {error}"[:500], fix="download it again"
        ) from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._offset, self._num_values = data, 0, 0

    def header(self) -> Header:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise ValueError(f"{num_tensors} tensors and {num_keys} keys")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_keys)}
        relative = {self._string(): self._tensor() for _ in range(num_tensors)}
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment <= 0:
            raise ValueError(f"{_ALIGNMENT} {str(alignment)[:100]}")
        start = -(-self._offset // alignment) * alignment
        tensors = {name: info._replace(offset=start + info.offset) for name, info in relative.items()}
        if any(info.offset >= len(self._data) for info in tensors.values()):
            raise ValueError("it ends in the middle of its tensors")
        return Header(metadata, tensors)

    def _tensor(self) -> TensorInfo:
        num_dimensions = self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {num_dimensions} dimensions")
        sizes = [self._scalar("Q") for _ in range(num_dimensions)]
        return TensorInfo(tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._scalar(_letter(kind))

    def _array(self, depth: int) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        self._num_values += length
        if self._num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ValueError(f"an array of {length} values, {depth} deep")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._value(kind, depth) for _ in range(length)]
        layout = f"<{length}{_letter(kind)}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _strings(self, count: int) -> list[str]:
        # not a `_string` for each: that takes a tenth of a second for a vocabulary
        data, offset, length_of = self._data, self._offset, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_of(data, offset)
            offset += 8 + length
            if offset > _MAX_HEADER_BYTES:
                break
            strings.append(data[offset - length : offset])
        self._offset = offset
        self._take(0)  # raises if that is too far
        return [string.decode("utf-8") for string in strings]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self._data, self._offset)
        self._offset += struct.calcsize("<" + letter)
        return value

    def _take(self, length: int) -> bytes:
        start, self._offset = self._offset, self._offset + length
        if self._offset > len(self._data):
            raise ValueError("it ends in the middle of its header")
        if self._offset > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of more than {_MAX_HEADER_BYTES} bytes")
        return self._data[start : self._offset]


def _letter(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind}")
    return _SCALARS[kind]
