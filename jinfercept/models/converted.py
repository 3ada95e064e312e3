"""Checkpoints of `jinfercept convert`: weights in their layout on the device, in a safetensors file for each block, with a
`ModelConfig` beside them.

Reading them is quick, since nothing is renamed, transposed or dequantised. The tokenizer's files are not known here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Never

import numpy as np
from jaxtyping import Shaped
from pydantic import TypeAdapter
from safetensors.numpy import save

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import StoredExperts, StoredTensor, TensorNames
from jinfercept.models.config import ModelConfig
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import Model, abstract_params, untied
from jinfercept.models.model_directory import check_regular
from jinfercept.models.protocol import Params
from jinfercept.models.weight_files import SafetensorsFile

_CONFIG, _WEIGHTS = "jinfercept.json", "weights"
_FORMAT = 2


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """An opened directory; every array is stored in the layout of the device."""

    config: ModelConfig
    names: TensorNames
    _files: Mapping[str, SafetensorsFile]

    @classmethod
    def open(cls, directory: Path) -> "ConvertedCheckpoint":
        """Read the config and the arrays' shapes. Raises `ModelError` if they are damaged, or of another version."""
        config = read_config(directory)
        paths = sorted((directory / _WEIGHTS).glob("*.safetensors"))
        for path in paths:
            check_regular(path)
        files = map(SafetensorsFile.open, paths)
        once = untied(config, abstract_params(config, np.float32, joined=False))
        names = TensorNames(
            embed={ours: StoredTensor(f"embed.{ours}") for ours in once.embed},
            layer={ours: _place(ours) for layer in once.layers for ours in layer},
            head={ours: StoredTensor(f"head.{ours}") for ours in once.head},
        )
        return cls(config, names, {name: file for file in files for name in file.shapes})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.shapes[name] for name, file in self._files.items()}

    @property
    def quantization(self) -> None:
        """No weight is quantised, so that none has a packing."""

    def packing(self, name: str) -> None: ...

    def read_packed(self, name: str, rows: slice) -> Never:
        raise AssertionError(name)

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        return self._files[name].read(name, rows)


def _place(name: str) -> StoredTensor | StoredExperts:
    """The place of a layer's weight."""
    stored = f"layers.{{i}}.{name}"
    return StoredExperts((stored,), "ours") if name.startswith("experts_") else StoredTensor(stored)


def is_converted(directory: Path) -> bool:
    """Whether `write` made this directory."""
    return (directory / _CONFIG).is_file()


@own_settings()
def write(directory: Path, model: Model, params: Params) -> None:
    """Write a model into a directory, which may exist.

    Raises:
        ModelError: there is a converted model already, or it cannot be written.
    """
    folder = directory / _WEIGHTS
    if folder.exists():
        raise ModelError("the directory holds a converted model already", got=directory, fix="name another directory")
    once = untied(model.config, separate(params))
    layers = {f"layers.{i}": layer for i, layer in enumerate(once.layers)}
    try:
        folder.mkdir(parents=True)
        for block, weights in ({"embed": once.embed, "head": once.head} | layers).items():
            arrays = {f"{block}.{name}": np.asarray(weight) for name, weight in weights.items()}
            (folder / f"{block}.safetensors").write_bytes(save(arrays))
        described = {"format": _FORMAT, "config": asdict(model.config)}
        (directory / _CONFIG).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError("the model cannot be written", got=error, fix="make room, or name another place") from error


def read_config(directory: Path) -> ModelConfig:
    """The config of a converted model. Raises `ModelError` if it is damaged, or of another version."""
    try:
        described = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        if described["format"] != _FORMAT:
            raise ValueError(f"format {described['format']}")
        return TypeAdapter(ModelConfig).validate_python(described["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{_CONFIG} is damaged or of a newer version",
            got=f"{directory}: {error}"[:500],
            fix="convert the model again",
        ) from error
