"""From the name of a model to its weights on the device, in the dtype asked for, tensor by tensor.

Every tensor's name and shape is checked against the config before the first is read. Formats are in
`safetensors_weights.py` and `gguf_weights.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jinfercept.errors import ModelError
from jinfercept.models import embedded
from jinfercept.models.checkpoint import Checkpoint, Stored
from jinfercept.models.config import ModelConfig
from jinfercept.models.dummy import random_params
from jinfercept.models.gguf_weights import GGUFCheckpoint
from jinfercept.models.model import Model, Params, Weights, abstract_params, tied, untied
from jinfercept.models.safetensors_weights import SafetensorsCheckpoint

DTypeName = Literal["float32", "bfloat16", "auto"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class Loaded:
    """A model with its weights; `source` is the directory or file they came from, which also holds the tokenizer."""

    model: Model
    params: Params
    source: Path | None
    kind: Literal["hf", "gguf", "dummy"]


def load(
    model: str | Path | ModelConfig, *, dtype: DTypeName = "auto", load_format: LoadFormat = "auto", seed: int = 0
) -> Loaded:
    """Load a model onto the default device.

    Args:
        model: a Hugging Face directory, a `.gguf` file or `smollm2-135m`; for dummy weights also a directory with
            only a `config.json`, or a config.
        dtype: of weights and activations; `auto` is float32 on the CPU, where bfloat16 is slow, and bfloat16 elsewhere.
        load_format: `dummy` makes random weights instead of reading any.
        seed: of the dummy weights.

    Raises:
        ModelError: there is no such model, or its config or its tensors do not fit.
    """
    target = ("float32" if jax.default_backend() == "cpu" else "bfloat16") if dtype == "auto" else dtype
    if isinstance(model, ModelConfig):
        if load_format != "dummy":
            raise ModelError(
                "a config alone has no weights", got=f"load_format={load_format}", fix="use load_format=dummy"
            )
        return Loaded(Model(model), random_params(model, target, seed), None, "dummy")

    source = _find(model)
    checkpoint = _open(source)
    if load_format == "dummy":
        return Loaded(Model(checkpoint.config), random_params(checkpoint.config, target, seed), source, "dummy")
    params = _read_params(checkpoint, target)
    return Loaded(Model(checkpoint.config), params, source, "gguf" if source.is_file() else "hf")


def read_config(model: str | Path) -> ModelConfig:
    """The config of a model that `load` would load, without its weights. Raises `ModelError` as `load` does."""
    return _open(_find(model)).config


def _open(source: Path) -> Checkpoint:
    return GGUFCheckpoint.open(source) if source.is_file() else SafetensorsCheckpoint.open(source)


def _find(model: str | Path) -> Path:
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if str(model) == embedded.NAME:
        return embedded.fetch()
    raise ModelError(
        "there is no such model",
        got=model,
        fix=f"give a Hugging Face directory (config.json and *.safetensors), a .gguf file, or {embedded.NAME}",
    )


def _read_params(checkpoint: Checkpoint, dtype: str) -> Params:
    config, names = checkpoint.config, checkpoint.names
    expected = untied(config, abstract_params(config, dtype))
    wanted = _stored(names.embed, expected.embed, 0) | _stored(names.head, expected.head, 0)
    for i, layer in enumerate(expected.layers):
        wanted |= _stored(names.layer, layer, i)
    unused = tuple(stored.name for ours, stored in names.head.items() if ours not in expected.head)
    _check(wanted, checkpoint.shapes, names.ignored + unused)

    def block(stored: Mapping[str, Stored], shapes: Weights, i: int = 0) -> Weights:
        return {
            ours: _place(checkpoint.read(stored[ours].name.format(i=i)), stored[ours].inputs, shape.shape, dtype)
            for ours, shape in shapes.items()
        }

    layers = tuple(block(names.layer, layer, i) for i, layer in enumerate(expected.layers))
    return tied(config, Params(block(names.embed, expected.embed), layers, block(names.head, expected.head)))


def _stored(names: Mapping[str, Stored], block: Weights, i: int) -> dict[str, tuple[int, ...]]:
    """The shapes that a block's tensors should have in the checkpoint."""
    return {names[ours].name.format(i=i): names[ours].shape(leaf.shape) for ours, leaf in block.items()}


def _check(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    """One error for everything that does not fit: a tensor that we would leave out could change what the model says."""
    if not found:
        raise ModelError(
            "the model has no weights", got="no *.safetensors", fix="download them, or use load_format=dummy"
        )
    wrong = [
        f"{name} expected {list(shape)} got {list(found[name]) if name in found else 'nothing'}"
        for name, shape in wanted.items()
        if found.get(name) != shape
    ]
    wrong += [f"{name} not expected" for name in found if name not in wanted and not name.endswith(ignored)]
    if wrong:
        raise ModelError(
            "the checkpoint's tensors do not fit its config",
            got="; ".join(wrong),
            fix="use files that belong together, of a plain Llama or GPT-J",
        )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _place(stored: Shaped[Array, "..."], inputs: int, shape: tuple[int, ...], dtype: str) -> Shaped[Array, "..."]:
    """A stored tensor on the device as ours: cast, input axes first."""
    array = stored.astype(jnp.dtype(dtype))
    return (array.T if inputs else array).reshape(shape)
