"""One `.safetensors` file: the shapes in its header, and rows of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jinfercept.errors import ModelError


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        """Read the header. Raises `ModelError` if it is damaged."""
        try:
            with safe_open(path, framework="numpy") as tensors:
                names = tensors.keys()
                return cls(path, {name: tuple(tensors.get_slice(name).get_shape()) for name in names})
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{path.name} is not a readable safetensors file", got=str(error)[:200], fix="download it again"
            ) from error

    def read(self, name: str, rows: slice | tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        try:
            with safe_open(self.path, framework="numpy") as tensors:
                return tensors.get_slice(name)[rows] if self.shapes[name] else tensors.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # dtypes that numpy lacks
            raise ModelError(
                f"{name} of {self.path.name} cannot be read", got=str(error)[:200], fix="use a float32 or bfloat16 file"
            ) from error
