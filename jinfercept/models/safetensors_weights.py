"""One `.safetensors` file: the shapes in its header, and rows of its tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jinfercept.errors import ModelError

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}
"""Names that numpy has for them."""


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file: its tensors' shapes and types."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        """Read the header. Raises `ModelError` if it is damaged."""
        try:
            with safe_open(path, framework="numpy") as tensors:
                names = tensors.keys()
                slices = {name: tensors.get_slice(name) for name in names}
                shapes = {name: tuple(stored.get_shape()) for name, stored in slices.items()}
                dtypes = {name: str(stored.get_dtype()) for name, stored in slices.items()}
                return cls(path, shapes, {name: _DTYPES.get(dtype, dtype) for name, dtype in dtypes.items()})
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{path.name} is not a readable safetensors file", got=str(error)[:200], fix="download it again"
            ) from error
        except MemoryError as error:
            raise _too_large(path, error) from error

    def read(self, name: str, rows: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        try:
            with safe_open(self.path, framework="numpy") as tensors:
                if self.shapes[name] and self.dtypes[name] == "float8_e4m3fn":
                    return self._float8(name)[rows]
                return tensors.get_slice(name)[rows] if self.shapes[name] and rows != () else tensors.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # dtypes that numpy lacks
            raise ModelError(
                f"{name} of {self.path.name} cannot be read", got=str(error)[:200], fix="use a float32 or bfloat16 file"
            ) from error
        except MemoryError as error:
            raise _too_large(self.path, error) from error

    def _float8(self, name: str) -> Shaped[np.ndarray, "..."]:
        # the package does not read e4m3 for numpy; a file begins with the length of its header
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(length))[name]["data_offsets"]
        return np.memmap(self.path, ml_dtypes.float8_e4m3fn, "r", 8 + length + first, self.shapes[name])


def _too_large(path: Path, error: MemoryError) -> ModelError:
    # a file is mapped as a whole, without reading it: a process whose addresses are limited may have no room
    got = f"{path.stat().st_size} bytes: {error}"[:200]
    return ModelError(
        f"{path.name} is larger than the memory that this process may have", got=got, fix="use a smaller file"
    )
