"""Checkpoints of our own: weights as they lie on the device, written and read by Orbax, with our config beside them.

Nothing is renamed, turned or dequantised when they are read, which is why it is quick. The tokenizer's files are not known here.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jinfercept.errors import ModelError
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.models.model import Model, Params, abstract_params, tied, untied

_CONFIG, _WEIGHTS = "jinfercept.json", "weights"
_FORMAT = 1


def is_converted(directory: Path) -> bool:
    """Whether `write` made this directory."""
    return (directory / _CONFIG).is_file()


def write(directory: Path, model: Model, params: Params) -> None:
    """Write a model into a directory that may exist, but has none yet.

    Raises:
        ModelError: there is a converted model already, or it cannot be written.
    """
    import orbax.checkpoint as ocp  # a second to import

    if (directory / _WEIGHTS).exists():
        raise ModelError("the directory holds a converted model already", got=directory, fix="name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save((directory / _WEIGHTS).resolve(), args=ocp.args.PyTreeSave(_tree(model.config, params)))
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
        rope = RopeConfig(**fields["rope"] | {"factors": tuple(fields["rope"]["factors"])})
        return ModelConfig(**fields | {"rope": rope, "eos_token_ids": tuple(fields["eos_token_ids"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{_CONFIG} is not of this version", got=f"{directory}: {error}", fix="convert the model again"
        ) from error


def read_params(directory: Path, config: ModelConfig, dtype: DTypeLike) -> Params:
    """The weights on the default device in `dtype`. Raises `ModelError` if they are damaged or do not fit the config."""
    import orbax.checkpoint as ocp

    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        _tree(config, abstract_params(config, dtype)),
    )
    largest = max(leaf.size * 4 for leaf in jax.tree.leaves(wanted))
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    try:
        with ocp.Checkpointer(_handler(largest)) as checkpointer:
            restore = ocp.args.PyTreeRestore(item=wanted, restore_args=how)
            blocks = checkpointer.restore((directory / _WEIGHTS).resolve(), args=restore)
    except Exception as error:  # whatever a damaged file makes of it
        raise ModelError(
            "the converted weights cannot be read",
            got=f"{directory}: {str(error).strip().splitlines()[0]}",
            fix="convert the model again",
        ) from error
    return tied(config, Params(blocks["embed"], tuple(blocks["layers"]), blocks["head"]))


def _tree(config: ModelConfig, params: Params) -> dict[str, Any]:
    """Every array once, in containers that Orbax gives back as they were."""
    once = untied(config, params)
    return {"embed": once.embed, "layers": list(once.layers), "head": once.head}


def _handler(b=None) -> Any:
    """Uncompressed: half-precision weights hardly shrink, and unpacking them takes longer than reading them."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(handler_impl=ocp.handlers.BasePyTreeCheckpointHandler(restore_concurrent_bytes=b and b + 1, use_compression=False) if hasattr(ocp.handlers,'BasePyTreeCheckpointHandler') else __import__('orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler',fromlist='x').BasePyTreeCheckpointHandler(restore_concurrent_bytes=b and b + 1,use_compression=False))
