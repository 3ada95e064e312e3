"""`pytorch_model.bin` files without torch: what GPT-J and Vicuna were published as.

Such a file is an uncompressed zip archive: a pickle that describes the tensors, and their bytes. Unpickling runs what the
file says, so only names that describe tensors are let through. Files from before PyTorch 1.6, no archives yet, are refused.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError

_DTYPES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Tensor(NamedTuple):
    """A tensor's place in its storage; offset and strides in elements."""

    storage: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class TorchFile:
    """An opened file: its tensors, and where each storage begins."""

    path: Path
    _tensors: Mapping[str, _Tensor]
    _starts: Mapping[str, int]

    @classmethod
    def open(cls, path: Path) -> "TorchFile":
        """Read what the file says of its tensors. Raises `ModelError` if it is of another kind, or damaged."""
        try:
            with zipfile.ZipFile(path) as archive:
                index = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
                with archive.open(index) as file:
                    tensors = _Unpickler(file).load()
                folder = index.filename.removesuffix("data.pkl") + "data/"
                stored = [info for info in archive.infolist() if info.filename.startswith(folder)]
            with path.open("rb") as file:
                starts = {info.filename.removeprefix(folder): _data_start(file, info) for info in stored}
        except (OSError, StopIteration, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, struct.error) as error:
            raise ModelError(
                f"{path.name} is not a readable file of torch weights",
                got=error or "no data.pkl",
                fix="download it again, or save the model as safetensors",
            ) from error
        return cls(path, {name: value for name, value in tensors.items() if isinstance(value, _Tensor)}, starts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        tensor = self._tensors[name]
        size = tensor.dtype.itemsize
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
        first_byte = self._starts[tensor.storage] + tensor.offset * size
        try:
            data = np.memmap(self.path, np.uint8, "r", first_byte, ((last + 1) * size,))
        except ValueError as error:
            raise ModelError(f"{self.path.name} ends too early", got=error, fix="download it again") from error
        strides = tuple(stride * size for stride in tensor.strides)
        return np.ndarray(tensor.shape, tensor.dtype, data, strides=strides)[rows]


class _Unpickler(pickle.Unpickler):
    """Reads dictionaries of tensors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return _rebuild
            case "torch._utils", "_rebuild_parameter":
                return lambda tensor, *_: tensor
            case "torch", _ if name in _DTYPES:
                return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> tuple[str, np.dtype]:
        _, dtype, key, *_ = pid
        return key, dtype


def _rebuild(storage: tuple[str, np.dtype], offset: int, shape: Any, strides: Any, *_: object) -> _Tensor:
    return _Tensor(*storage, offset, tuple(shape), tuple(strides))


def _data_start(file: Any, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: behind its local header, whose name and extra field have lengths of their own."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename} is compressed")
    file.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + name_length + extra_length
