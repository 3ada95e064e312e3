"""Reads `pytorch_model.bin` files without torch; GPT-J and Vicuna were published in them.

Such a file is an uncompressed zip archive: a pickle that describes the tensors, and their bytes. A pickle is a program. Only
the instructions that make dictionaries of tensors are followed here, and only names that belong to tensors are let through, so
that nothing of the file is run. Files from before PyTorch 1.6, no archives yet, are refused.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError

_MAX_PICKLE_BYTES = 64 << 20  # a tensor takes about 150

_DTYPES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Tensor(NamedTuple):
    storage: str
    dtype: np.dtype
    offset: int  # in elements, as strides
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
        """Read the names, types and places of the tensors. Raises `ModelError` for a damaged file or one of another kind."""
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as file:
                members = {info.filename: info for info in archive.infolist()}
                index = next((name for name in members if name.endswith("/data.pkl")), None)
                if index is None:
                    raise zipfile.BadZipFile("no data.pkl")
                tensors = _Unpickler(_pickle(file, members[index])).load()
                if not isinstance(tensors, dict):
                    raise pickle.UnpicklingError(f"{type(tensors).__name__} instead of a dictionary of tensors")
                folder = index.removesuffix("data.pkl") + "data/"
                stored = {name.removeprefix(folder): info for name, info in members.items() if name.startswith(folder)}
                tensors_by_name = {name: value for name, value in tensors.items() if isinstance(value, _Tensor)}
                for name, tensor in tensors_by_name.items():
                    _check(name, tensor, stored)
                starts = {
                    key: _data_start(file, stored[key])
                    for key in {tensor.storage for tensor in tensors_by_name.values()}
                }
        except Exception as error:  # zipfile and pickle raise anything for damaged files
            raise ModelError(
                f"{path.name} is not a readable file of torch weights",
                got=str(error)[:200] or type(error).__name__,
                fix="download it again, or save the model as safetensors",
            ) from error
        return cls(path, tensors_by_name, starts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: tensor.dtype.name for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        tensor = self._tensors[name]
        size = tensor.dtype.itemsize
        first_byte = self._starts[tensor.storage] + tensor.offset * size
        try:
            data = np.memmap(self.path, np.uint8, "r", first_byte, (_extent(tensor) * size,))
        except ValueError as error:
            raise ModelError(f"{self.path.name} ends too early", got=error, fix="download it again") from error
        strides = tuple(stride * size for stride in tensor.strides)
        return np.ndarray(tensor.shape, tensor.dtype, data, strides=strides)[rows]


class _Unpickler(pickle._Unpickler):  # the one in Python: that in C takes memory for any number that the file names
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
            *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BINPERSID),
        )
    } | {
        pickle.SETITEM[0]: lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self.set_items(self.pop_mark()),
        pickle.BUILD[0]: lambda self: self.stack.pop(),  # attributes of a dictionary
    }

    def set_items(self, items: list[Any]) -> None:
        names, values = items[::2], items[1::2]
        # names only: to compare other keys can take for ever
        if not isinstance(self.stack[-1], dict) or not all(isinstance(name, str) for name in names):
            raise pickle.UnpicklingError("a dictionary of other things than names")
        self.stack[-1].update(zip(names, values, strict=True))

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return dict
            case "torch._utils", "_rebuild_tensor_v2":
                return _rebuild
            case "torch._utils", "_rebuild_parameter":
                return lambda tensor, *_: tensor
            case "torch", _ if name in _DTYPES:
                return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}"[:100] + " is no part of a tensor")

    def persistent_load(self, pid: Any) -> tuple[str, np.dtype]:
        match pid:
            case (_, np.dtype() as dtype, str(key), *_):
                return key, dtype
        raise pickle.UnpicklingError("a storage without a type and a name")


def _rebuild(storage: tuple[str, np.dtype], offset: int, shape: Any, strides: Any, *_: object) -> _Tensor:
    return _Tensor(*storage, offset, tuple(shape), tuple(strides))


def _check(name: str, tensor: _Tensor, stored: Mapping[str, zipfile.ZipInfo]) -> None:
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    whole = all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
    if not whole or len(tensor.shape) != len(tensor.strides) or not isinstance(tensor.dtype, np.dtype):
        raise ValueError(f"{name[:100]} has no shape")
    if tensor.storage not in stored:
        raise ValueError(f"{name[:100]} has no data")
    room = stored[tensor.storage].file_size // tensor.dtype.itemsize
    if tensor.offset + max(_extent(tensor), math.prod(tensor.shape)) > room:
        raise ValueError(f"{name[:100]} is larger than its data")


def _extent(tensor: _Tensor) -> int:
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
    return 1 + sum(steps) if all(tensor.shape) else 0


def _pickle(file: Any, info: zipfile.ZipInfo) -> io.BytesIO:
    if info.file_size > _MAX_PICKLE_BYTES:
        raise zipfile.BadZipFile(f"{info.filename[:100]} has {info.file_size} bytes")
    file.seek(_data_start(file, info))
    return io.BytesIO(file.read(info.file_size))


def _data_start(file: Any, info: zipfile.ZipInfo) -> int:
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename[:100]} is compressed")
    file.seek(info.header_offset + 26)
    # bytes begin behind a local header, whose name and extra field have lengths of their own
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    start, end = info.header_offset + 30 + name_length + extra_length, file.seek(0, io.SEEK_END)
    if start + info.file_size > end:
        raise zipfile.BadZipFile(f"it ends in the middle of {info.filename[:100]}")
    return start
