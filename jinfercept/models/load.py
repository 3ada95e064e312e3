"""Loads a model by name: its weights, tensor by tensor, onto the device in the requested dtype.

Every tensor's name and shape is checked against the config before the first is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfercept.cpu_kernels import native
from jinfercept.cpu_kernels.machine import return_freed_memory
from jinfercept.errors import ModelError
from jinfercept.models import embedded
from jinfercept.models.checkpoint import Checkpoint, StoredExperts, StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.converted import ConvertedCheckpoint, is_converted
from jinfercept.models.hf_weights import HFCheckpoint
from jinfercept.models.hf_weights import read_config as read_hf
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.joined_weights import is_joined, serve_layer
from jinfercept.models.mesh import ModelMesh, place
from jinfercept.models.model import Model, abstract_params, param_bytes, tied, untied
from jinfercept.models.model_directory import check_model_directory, fetch_repository, is_hub_id
from jinfercept.models.protocol import Params, ServedModel, Weights
from jinfercept.models.quantized import is_quantized, weights_of
from jinfercept.models.sharding import fit, partition_spec
from jinfercept.models.stored_weights import (
    LazyWeight,
    StoredWeight,
    keep_quantized,
    read_experts,
    read_quantized,
    read_weight,
    weight_bytes,
)

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

    def for_length(self, max_model_len: int | None) -> "Loaded[M]":
        """The model for sequences of at most `max_model_len` tokens, see `ModelConfig.for_length`."""
        if not isinstance(self.model, Model):
            return self
        return replace(self, model=replace(self.model, config=self.model.config.for_length(max_model_len)))


def load(
    model: str | Path | ModelConfig,
    *,
    dtype: DTypeName = "auto",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    mesh: ModelMesh | None = None,
    quantization: str = "auto",
    activation_dtype: str = "auto",
    draft_layer: bool = False,
) -> Loaded[Model]:
    """Load a model onto its devices.

    Args:
        model: a Hugging Face directory, or its id on the hub (`owner/name`, `owner/name@revision`), a directory that
            `jinfercept convert` wrote, a `.gguf` file, or `smollm2-135m`; for dummy weights also a directory with only a
            `config.json`, or a config.
        dtype: of weights and activations; `auto` is float32 on the CPU, where bfloat16 is slow, and bfloat16 elsewhere.
        load_format: `dummy` makes random weights, by `seed`, instead of reading any.
        mesh: None: JAX's default device.
        quantization: see `keeps_quantized`.
        activation_dtype: `int8`: rows are rounded to 8 bits before they are multiplied with quantised weights of 4 or 8 bits.
        draft_layer: whether the layer that drafts is loaded, too.

    Raises:
        ModelError: there is no such model, its config or its tensors do not fit, no weight is for rows of 8 bits, or no layer
            drafts.
        ConfigError: the model cannot be cut for so many devices.
    """
    target, mesh = dtype_name(dtype), mesh or ModelMesh.default()
    with own_settings(mesh.local_devices[0]):
        return _load(model, target, load_format, seed, mesh, quantization, activation_dtype, draft_layer)


def _with_int8_rows(shapes: Params, checkpoint: Checkpoint, quantization: str, num_devices: int) -> Params:
    shapes = jax.tree.map(
        lambda shape: shape.of_int8_rows() if is_quantized(shape) else shape, shapes, is_leaf=is_quantized
    )
    if not any(is_quantized(shape) and shape.int8_rows for shape in weights_of(shapes)):
        stored_format = checkpoint.quantization or "no"
        raise _no_int8_rows(f"{stored_format} quantisation, quantization={quantization} on {num_devices} devices")
    return shapes


def _no_int8_rows(got: str) -> ModelError:
    return ModelError(
        "activation_dtype int8 needs weights in integers of 4 or 8 bits that stay quantised",
        got=got,
        fix="activation_dtype=auto, or a GGUF, GPTQ or AWQ checkpoint with the quantization of its name",
    )


def _load(
    model: str | Path | ModelConfig,
    dtype: str,
    load_format: str,
    seed: int,
    mesh: ModelMesh,
    quantization: str,
    activation_dtype: str,
    draft_layer: bool,
) -> Loaded[Model]:
    if load_format == "dummy":
        if activation_dtype != "auto":
            raise _no_int8_rows("random weights (load_format=dummy)")
        source, config = None if isinstance(model, ModelConfig) else locate(model), _config(model, draft_layer)
        return Loaded(Model(config).on_devices(mesh.size), random_params(config, dtype, seed, mesh), source)
    if isinstance(model, ModelConfig):
        raise ModelError("a config alone has no weights", got=f"load_format={load_format}", fix="use load_format=dummy")
    source = _find(model, weights=True)
    checkpoint = _open(source, draft_layer=draft_layer)
    served = Model(checkpoint.config).on_devices(mesh.size)
    cut = _served_shapes(checkpoint, served.config, dtype, mesh.size, quantization)
    if activation_dtype == "int8":
        cut = _with_int8_rows(cut, checkpoint, quantization, mesh.size)
    params = _read_params(checkpoint, cut, dtype, mesh)
    return Loaded(replace(served, joined=any(map(is_joined, params.layers))), params, source)


def bytes_to_load(
    model: str | Path | ModelConfig,
    dtype: str,
    num_devices: int = 1,
    load_format: LoadFormat = "auto",
    quantization: str = "auto",
    draft_layer: bool = False,
) -> int:
    """Bytes of a model's weights on each of `num_devices`, without loading it. Arguments and errors as `load`'s."""
    if isinstance(model, ModelConfig) or load_format == "dummy":
        config = _config(model, draft_layer)
        return param_bytes(Model(config).on_devices(num_devices).config, dtype, num_devices)
    checkpoint = _open(locate(model), weights=False, draft_layer=draft_layer)
    served = Model(checkpoint.config).on_devices(num_devices).config
    return weight_bytes(_served_shapes(checkpoint, served, dtype, num_devices, quantization), num_devices)


def quantization_of(model: str | Path) -> str | None:
    """The format of a model's quantised weights; None: there are none. Raises `ModelError` as `load` does."""
    return _open(locate(model), weights=False).quantization


def keeps_quantized(checkpoint: Checkpoint, quantization: str, num_devices: int = 1) -> bool:
    """Whether quantised weights of a checkpoint stay so on the device. Raises `ModelError` if it has none of this format.

    The name of the checkpoint's format keeps them; `none` dequantises them while they are loaded; `auto` keeps them, but for
    GGUF files on a CPU without kernels for them, and on several CPUs.
    """
    stored_format = checkpoint.quantization
    if quantization not in ("auto", "none", stored_format):
        raise ModelError(
            "quantization differs from how the weights are stored",
            got=f"{quantization}, weights of {stored_format}",
            fix="quantization=auto",
        )
    if quantization == "auto":
        has_kernels = jax.default_backend() != "cpu" or (num_devices == 1 and native.usable())
        return stored_format is not None and (stored_format != "gguf" or has_kernels)
    return quantization == stored_format


def dtype_name(dtype: str) -> str:
    """The dtype that `auto` stands for on JAX's default backend; any other name is itself."""
    return ("float32" if jax.default_backend() == "cpu" else "bfloat16") if dtype == "auto" else dtype


def read_config(model: str | Path, *, draft_layer: bool = False) -> ModelConfig:
    """The config of a model that `load` would load. Raises `ModelError` as `load` does, but the weights of a Hugging Face
    directory may be missing, or of a kind that is not served."""
    source = locate(model)
    if _kind(source) == "hf":
        return read_hf(source, draft_layer=draft_layer)
    return _open(source, draft_layer=draft_layer).config


def _config(model: str | Path | ModelConfig, draft_layer: bool) -> ModelConfig:
    if isinstance(model, ModelConfig):
        return model.with_draft_layer() if draft_layer else model
    return read_config(model, draft_layer=draft_layer)


def locate(model: str | Path) -> Path:
    """The directory or file of a model; its weights need not be there. Raises `ModelError` if there is no such model."""
    return _find(model, weights=False)


def _open(source: Path, *, weights: bool = True, draft_layer: bool = False) -> Checkpoint:
    kind = _kind(source)
    match kind:
        case "gguf":
            from jinfercept.models.gguf_weights import GGUFCheckpoint  # the package gguf: only these files need it

            return GGUFCheckpoint.open(source, draft_layer=draft_layer)
        case "converted":
            if draft_layer:
                fix = "the directory that it was converted from, or another method of speculative_config"
                raise ModelError("a converted model has no layer that drafts (mtp)", got=source, fix=fix)
            return ConvertedCheckpoint.open(source)
        case "hf":
            return HFCheckpoint.open(source, weights=weights, draft_layer=draft_layer)


def _kind(source: Path) -> Literal["hf", "gguf", "converted"]:
    if source.is_file():
        return "gguf"
    return "converted" if is_converted(source) else "hf"


def _find(model: str | Path, *, weights: bool) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        check_model_directory(path)
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


def _served_shapes(
    checkpoint: Checkpoint, served: ModelConfig, dtype: str, num_devices: int, quantization: str
) -> Params:
    cut = untied(checkpoint.config, abstract_params(served, dtype, joined=False, num_devices=num_devices))
    return (
        keep_quantized(checkpoint, cut, num_devices) if keeps_quantized(checkpoint, quantization, num_devices) else cut
    )


def lazy_params(model: str | Path, dtype: str, mesh: ModelMesh, *, draft_layer: bool = False) -> Params:
    """A model's weights as `LazyWeight`s, dequantised, apart and each once. Arguments and errors are those of `load`, but a
    weight that cannot be read raises when it is made."""
    settled = own_settings(mesh.local_devices[0])
    with own_settings(mesh.local_devices[0]):
        checkpoint = _open(_find(model, weights=True), draft_layer=draft_layer)
        served = Model(checkpoint.config).on_devices(mesh.size).config
        cut = _served_shapes(checkpoint, served, dtype, mesh.size, "none")
        weights = _lazy_params(checkpoint, cut, dtype, mesh)
    return jax.tree.map(lambda weight: replace(weight, make=settled(weight.make)), weights)


def _read_params(checkpoint: Checkpoint, cut: Params, dtype: str, mesh: ModelMesh) -> Params:
    def read(block: Weights) -> Weights:
        return {name: weight.make() for name, weight in block.items()}

    weights = _lazy_params(checkpoint, cut, dtype, mesh)
    layers = list[Weights]()
    for layer in weights.layers:  # one after the other: a layer may be in memory twice while it is joined
        layers.append(jax.block_until_ready(serve_layer(read(layer))))
        return_freed_memory()
    return tied(checkpoint.config, Params(read(weights.embed), tuple(layers), read(weights.head)))


def _lazy_params(checkpoint: Checkpoint, cut: Params, dtype: str, mesh: ModelMesh) -> Params:
    config, names = checkpoint.config, checkpoint.names
    expected = untied(config, abstract_params(config, dtype, joined=False))
    expected_shapes = _stored(names.embed, expected.embed, 0) | _stored(names.head, expected.head, 0)
    for i, layer in enumerate(expected.layers):
        expected_shapes |= _stored(names.layer, layer, i)
    unused = tuple(stored.name for ours, stored in names.head.items() if ours not in expected.head)
    _check(expected_shapes, checkpoint.shapes, names.ignored + unused)

    least, most = PIECE_BYTES
    piece_bytes = min(max(param_bytes(config, dtype) // 64, least), most)

    stored_shapes = checkpoint.shapes

    def lazy(place: StoredTensor | StoredExperts, i: int, ours: str, target: Any) -> LazyWeight:
        if isinstance(place, StoredExperts):
            return LazyWeight(target.shape, partial(read_experts, checkpoint, place, i, ours, target, mesh))
        tensor = place.name.format(i=i)
        weight = StoredWeight(ours, tensor, place, stored_shapes[tensor][0], target.shape)
        if is_quantized(target):
            return LazyWeight(target.shape, partial(read_quantized, checkpoint, weight, target, piece_bytes, mesh))
        return LazyWeight(target.shape, partial(read_weight, checkpoint, weight, target.dtype.name, piece_bytes, mesh))

    def block(stored: Mapping[str, StoredTensor | StoredExperts], shapes: Weights, i: int = 0) -> Weights:
        return {ours: lazy(stored[ours], i, ours, target) for ours, target in shapes.items()}

    layers = tuple(block(names.layer, layer, i) for i, layer in enumerate(cut.layers))
    return Params(block(names.embed, cut.embed), layers, block(names.head, cut.head))


def _stored(names: Mapping[str, StoredTensor | StoredExperts], block: Weights, i: int) -> dict[str, tuple[int, ...]]:
    return {name: shape for ours, leaf in block.items() for name, shape in names[ours].tensors(leaf.shape, i).items()}


def _check(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    if not stored:
        raise ModelError(
            "the model has no weights",
            got="no model.safetensors and no pytorch_model.bin",
            fix="download them, or use load_format=dummy",
        )
    wrong = [
        f"{name} expected {list(shape)} got {list(stored[name]) if name in stored else 'nothing'}"
        for name, shape in expected.items()
        if stored.get(name) != shape
    ]
    # a tensor that is left out could change the output of the model
    wrong += [f"{name} not expected" for name in stored if name not in expected and not name.endswith(ignored)]
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ModelError(
            "the checkpoint's tensors do not fit its config",
            got="; ".join(problem[:200] for problem in [*wrong[:_SHOWN], *more]),
            fix="use files that belong together, of a plain model of a family that is served",
        )


def random_params(config: ModelConfig, dtype: DTypeLike, seed: int, mesh: ModelMesh | None = None) -> Params:
    """Random weights, made on the devices, JAX's default one if `mesh` is None; any number of them gets the same for a seed."""
    mesh = mesh or ModelMesh.default()
    shapes = untied(config, abstract_params(config, dtype, joined=False))
    served = Model(config).on_devices(mesh.size).config
    cut = untied(config, abstract_params(served, dtype, joined=False, num_devices=mesh.size))
    embed_key, head_key, *layer_keys = jax.random.split(jax.random.key(seed), 2 + config.num_layers)

    def maker(block: Weights, cut_block: Weights) -> Callable[[jax.Array], Weights]:
        return partial(_placed, jax.jit(partial(_random_block, block, config.hidden_size**-0.5)), cut_block, mesh)

    embed, head = maker(shapes.embed, cut.embed), maker(shapes.head, cut.head)
    by_kind = {config.kind(i): maker(shapes.layers[i], cut.layers[i]) for i in range(config.num_layers)}
    layers = tuple(serve_layer(by_kind[config.kind(i)](key)) for i, key in enumerate(layer_keys))
    return tied(config, Params(embed(embed_key), layers, head(head_key)))


def _placed(make: Callable[[jax.Array], Weights], cut_block: Weights, mesh: ModelMesh, key: jax.Array) -> Weights:
    # made on one device and cut from there, so that only one block at a time is whole
    weights = make(key)
    if mesh.size == 1:
        return weights
    return jax.block_until_ready(
        {
            name: place(fit(name, weight, cut_block[name].shape), mesh.sharding(partition_spec(name)))
            for name, weight in weights.items()
        }
    )


def _random_block(shapes: Weights, scale: float, key: jax.Array) -> Weights:
    # one draw for all: each costs seconds of compiling
    draws = jax.random.uniform(key, (sum(leaf.size for leaf in shapes.values()),), minval=-1, maxval=1)
    weights, start = {}, 0
    for name, leaf in shapes.items():
        if leaf.ndim == 1 or name.endswith(("bias", "norm")):
            weights[name] = jnp.full(leaf.shape, 0 if name.endswith("bias") else 1, leaf.dtype)
        else:
            drawn = draws[start : start + leaf.size].reshape(leaf.shape)
            weights[name] = (drawn * scale * 3**0.5).astype(leaf.dtype)  # of deviation `scale`
        start += leaf.size
    return weights
