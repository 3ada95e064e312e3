"""Loads a model by name: its weights, tensor by tensor, onto the device in the requested dtype.

Every tensor's name and shape is checked against the config before the first is read. Formats are in `hf_weights.py`,
`gguf_weights.py` and `converted.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jinfercept.errors import ModelError
from jinfercept.models import embedded
from jinfercept.models.checkpoint import Checkpoint, StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.converted import ConvertedCheckpoint, is_converted
from jinfercept.models.converted import read_config as read_converted
from jinfercept.models.dummy import random_params
from jinfercept.models.hf_weights import HFCheckpoint
from jinfercept.models.hf_weights import read_config as read_hf
from jinfercept.models.hub import fetch_repository, is_hub_id
from jinfercept.models.joined_weights import serve_layer
from jinfercept.models.model import Model, abstract_params, param_bytes, tied, untied
from jinfercept.models.protocol import Params, ServedModel, Weights

DTypeName = Literal["float32", "bfloat16", "auto"]
LoadFormat = Literal["auto", "dummy"]
_SHOWN = 50  # tensors in an error
PIECE_BYTES = (4 << 20, 64 << 20)
"""Least and most bytes of a tensor, as float32, that are read at a time; in between, a 64th of the weights."""


@dataclass(frozen=True)
class Loaded[M: ServedModel]:
    """A model with its weights; `source` is the directory or file they came from, which also holds the tokenizer."""

    model: M
    params: Params
    source: Path | None
    kind: Literal["hf", "gguf", "converted", "dummy"]


def load(
    model: str | Path | ModelConfig, *, dtype: DTypeName = "auto", load_format: LoadFormat = "auto", seed: int = 0
) -> Loaded[Model]:
    """Load a model onto the default device.

    Args:
        model: a Hugging Face directory, or its id on the hub (`owner/name`, `owner/name@revision`), a directory that
            `jinfercept convert` wrote, a `.gguf` file, or `smollm2-135m`; for dummy weights also a
            directory with only a `config.json`, or a config.
        dtype: of weights and activations; `auto` is float32 on the CPU, where bfloat16 is slow, and bfloat16 elsewhere.
        load_format: `dummy` makes random weights instead of reading any.
        seed: of the dummy weights.

    Raises:
        ModelError: there is no such model, or its config or its tensors do not fit.
    """
    target = dtype_name(dtype)
    if isinstance(model, ModelConfig):
        if load_format != "dummy":
            raise ModelError(
                "a config alone has no weights", got=f"load_format={load_format}", fix="use load_format=dummy"
            )
        return Loaded(Model(model), random_params(model, target, seed), None, "dummy")

    source = _find(model, weights=load_format != "dummy")
    if load_format == "dummy":
        config = _config(source)
        return Loaded(Model(config), random_params(config, target, seed), source, "dummy")
    checkpoint = _open(source)
    return Loaded(Model(checkpoint.config), _read_params(checkpoint, target), source, _kind(source))


def dtype_name(dtype: str) -> str:
    """The dtype that `auto` stands for on the default device; any other name is itself."""
    return ("float32" if jax.default_backend() == "cpu" else "bfloat16") if dtype == "auto" else dtype


def read_config(model: str | Path) -> ModelConfig:
    """The config of a model that `load` would load, without its weights. Raises `ModelError` as `load` does."""
    return _config(locate(model))


def locate(model: str | Path) -> Path:
    """The directory or file of a model; its weights need not be there. Raises `ModelError` if there is no such model."""
    return _find(model, weights=False)


def _config(source: Path) -> ModelConfig:
    """The config alone: the weights may not be there."""
    match _kind(source):
        case "gguf":
            return _open_gguf(source).config
        case "converted":
            return read_converted(source)
        case "hf":
            return read_hf(source)


def _open(source: Path) -> Checkpoint:
    formats = {"gguf": _open_gguf, "converted": ConvertedCheckpoint.open, "hf": HFCheckpoint.open}
    return formats[_kind(source)](source)


def _open_gguf(source: Path) -> Checkpoint:
    from jinfercept.models.gguf_weights import GGUFCheckpoint  # the package gguf: only these files need it

    return GGUFCheckpoint.open(source)


def _kind(source: Path) -> Literal["hf", "gguf", "converted"]:
    if source.is_file():
        return "gguf"
    return "converted" if is_converted(source) else "hf"


def _find(model: str | Path, *, weights: bool) -> Path:
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if str(model) == embedded.NAME:
        return embedded.fetch()
    if is_hub_id(str(model)):
        return fetch_repository(str(model), weights=weights)
    raise ModelError(
        "there is no such model",
        got=model,
        fix="give a Hugging Face directory (config.json and *.safetensors) or its id on the hub (owner/name), "
        f"a .gguf file, or {embedded.NAME}",
    )


def _read_params(checkpoint: Checkpoint, dtype: str) -> Params:
    config, names = checkpoint.config, checkpoint.names
    expected = untied(config, abstract_params(config, dtype, joined=False))
    wanted = _stored(names.embed, expected.embed, 0) | _stored(names.head, expected.head, 0)
    for i, layer in enumerate(expected.layers):
        wanted |= _stored(names.layer, layer, i)
    unused = tuple(stored.name for ours, stored in names.head.items() if ours not in expected.head)
    _check(wanted, checkpoint.shapes, names.ignored + unused)

    least, most = PIECE_BYTES
    piece_bytes = min(max(param_bytes(config, dtype) // 64, least), most)

    def block(stored: Mapping[str, StoredTensor], shapes: Weights, i: int = 0) -> Weights:
        return {
            ours: _read(checkpoint, stored[ours].name.format(i=i), stored[ours], shape.shape, dtype, piece_bytes)
            for ours, shape in shapes.items()
        }

    layers = tuple(  # one after the other: a layer may be in memory twice while it is joined
        jax.block_until_ready(serve_layer(block(names.layer, layer, i))) for i, layer in enumerate(expected.layers)
    )
    return tied(config, Params(block(names.embed, expected.embed), layers, block(names.head, expected.head)))


def _stored(names: Mapping[str, StoredTensor], block: Weights, i: int) -> dict[str, tuple[int, ...]]:
    """The shapes that a block's tensors should have in the checkpoint."""
    return {names[ours].name.format(i=i): names[ours].shape(leaf.shape) for ours, leaf in block.items()}


def _check(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    """Raise one `ModelError` for all tensors that do not fit: an ignored tensor could change the output of the model."""
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
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ModelError(
            "the checkpoint's tensors do not fit its config",
            got="; ".join(one[:200] for one in [*wrong[:_SHOWN], *more]),
            fix="use files that belong together, of a plain Llama, Mistral, Qwen2, Qwen3 or GPT-J",
        )


def _read(
    checkpoint: Checkpoint, name: str, stored: StoredTensor, shape: tuple[int, ...], dtype: str, piece_bytes: int
) -> Shaped[Array, "..."]:
    """A weight on the device. A large one is copied in pieces, to bound host memory."""
    num_rows, *columns = stored.shape(shape)
    head_dim = checkpoint.config.head_dim
    step = max(1, piece_bytes // (4 * math.prod(columns) * head_dim)) * head_dim
    if num_rows <= step:
        placed = _place(_rows(checkpoint, name, 0, num_rows), stored.inputs, shape, dtype)
        return jax.block_until_ready(placed)
    placed = jnp.zeros(shape, dtype)
    for start in range(0, num_rows, step):
        rows = _rows(checkpoint, name, start, min(start + step, num_rows))
        placed = jax.block_until_ready(_place_rows(placed, rows, start, stored.inputs))
    return placed


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
    rows = checkpoint.read(name, slice(start, stop))
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ModelError(
            "weights are floating-point numbers", got=f"{name} of {rows.dtype}", fix="use another checkpoint"
        )
    return rows


@partial(jax.jit, static_argnums=(1, 2, 3))
def _place(stored: Shaped[Array, "..."], inputs: int, shape: tuple[int, ...], dtype: str) -> Shaped[Array, "..."]:
    """A stored tensor as ours: cast, input axes first."""
    array = stored.astype(jnp.dtype(dtype))
    return (array.T if inputs else array).reshape(shape)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _place_rows(
    placed: Shaped[Array, "..."], rows: Shaped[Array, "..."], start: Int[Array, ""], inputs: int
) -> Shaped[Array, "..."]:
    """`placed` with the stored rows from `start` on written where they belong, in place."""
    if not inputs:
        return jax.lax.dynamic_update_slice_in_dim(placed, rows.astype(placed.dtype), start, axis=0)
    matrix = placed.reshape(rows.shape[1], -1)
    return jax.lax.dynamic_update_slice_in_dim(matrix, rows.astype(placed.dtype).T, start, axis=1).reshape(placed.shape)
