"""Checkpoints of `jinfercept convert`: weights in their layout on the device, written by Orbax, with a `ModelConfig` beside
them.

Reading them is quick, since nothing is renamed, transposed or dequantised. Orbax's arrays are TensorStore's;
reading goes to that library, since Orbax restores whole arrays, several at a time, and would hold a small model almost twice.
The tokenizer's files are not known here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jinfercept.errors import ModelError
from jinfercept.models.checkpoint import StoredExperts, StoredTensor, TensorNames
from jinfercept.models.config import DeltaNetConfig, ExpertsConfig, LayerKind, ModelConfig, RopeConfig
from jinfercept.models.jax_settings import own_settings
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import Model, abstract_params, untied
from jinfercept.models.model_directory import check_regular
from jinfercept.models.protocol import Params

_CONFIG, _WEIGHTS = "jinfercept.json", "weights"
_FORMAT = 1
_CHUNK_BYTES = 4 << 20  # so that a part of an array can be read without the rest


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """An opened directory; every array is stored in the layout of the device."""

    config: ModelConfig
    names: TensorNames
    _arrays: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "ConvertedCheckpoint":
        """Read the config and the arrays' shapes. Raises `ModelError` if they are damaged, missing or of another version."""
        import tensorstore as ts

        config = read_config(directory)
        for path in (directory / _WEIGHTS).rglob("*"):
            if not path.is_dir():
                check_regular(path)
        once = untied(config, abstract_params(config, np.float32, joined=False))
        names = TensorNames(
            embed={ours: StoredTensor(f"embed.{ours}") for ours in once.embed},
            layer={ours: _place(ours) for layer in once.layers for ours in layer},
            head={ours: StoredTensor(f"head.{ours}") for ours in once.head},
        )
        full = {f"embed.{ours}" for ours in once.embed} | {f"head.{ours}" for ours in once.head}
        full |= {f"layers.{i}.{ours}" for i, layer in enumerate(once.layers) for ours in layer}
        base = (directory / _WEIGHTS).resolve().as_uri() + "/"

        one_thread = {"limit": 1}  # every further one would keep the memory of its buffers
        context = ts.Context({"data_copy_concurrency": one_thread, "file_io_concurrency": one_thread})

        def opened(name: str) -> Any:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, context=context)

        try:
            arrays = {name: future.result() for name, future in {name: opened(name) for name in sorted(full)}.items()}
        except ValueError as error:
            raise _damaged(directory, error) from error
        return cls(config, names, arrays)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._arrays.items()}

    def read(self, name: str, rows: slice) -> Shaped[np.ndarray, "..."]:
        try:
            return self._arrays[name][rows].read().result()
        except ValueError as error:
            raise _damaged(name, error) from error


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
    import orbax.checkpoint as ocp  # a second to import

    if (directory / _WEIGHTS).exists():
        raise ModelError("the directory holds a converted model already", got=directory, fix="name another directory")
    once = untied(model.config, separate(params))
    tree = {"embed": once.embed, "layers": list(once.layers), "head": once.head}
    chunked = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False
        )  # weights hardly shrink, and unpacking takes longer
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((directory / _WEIGHTS).resolve(), args=ocp.args.PyTreeSave(tree, chunked))
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
        fields = described["config"]
        # A field with a default may be younger than the file.
        kinds = tuple(LayerKind(window, rope and _rope(rope), *rest) for window, rope, *rest in fields.get("kinds", ()))
        own_types = {"rope": _rope(fields["rope"]), "kinds": kinds, "eos_token_ids": tuple(fields["eos_token_ids"])}
        if experts := fields.get("experts"):
            swiglu = experts.get("swiglu")
            own_types["experts"] = ExpertsConfig(**experts | {"swiglu": swiglu and tuple(swiglu)})
        own_types["delta_net"] = DeltaNetConfig(**fields["delta_net"]) if fields.get("delta_net") else None
        return ModelConfig(**fields | own_types)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{_CONFIG} is damaged or of a newer version",
            got=f"{directory}: {error}"[:500],
            fix="convert the model again",
        ) from error


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("factors", "long_factors")}})


def _damaged(what: object, error: ValueError) -> ModelError:
    return ModelError(
        "the converted weights cannot be read",
        got=f"{what}: {str(error).strip().splitlines()[0]}",
        fix="convert the model again",
    )
