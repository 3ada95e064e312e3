"""Reads adapters as PEFT saves them: a directory with `adapter_config.json` and `adapter_model.safetensors`.

What PEFT can train and this cannot serve is refused: an adapter never counts in part.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Shaped

from jinfercept.errors import ModelError
from jinfercept.models.adapters import WEIGHTS, AdapterWeights, Factors
from jinfercept.models.checkpoint import StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.hf_weights import FUSED, names_of
from jinfercept.models.model import abstract_params
from jinfercept.models.model_directory import check_regular, read_json
from jinfercept.models.peft_config import PeftConfig
from jinfercept.models.protocol import Weights
from jinfercept.models.safetensors_weights import SafetensorsFile
from jinfercept.models.weight_axes import NUM_INPUTS
from jinfercept.models.weight_files import text_name

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_LAYER = re.compile(r"\.(0|[1-9][0-9]{0,8})\.")
_SHOWN = 5


type Matrices = Mapping[str, Shaped[np.ndarray, "..."]]
"""An adapter's matrices by PEFT's names."""


class _Place(NamedTuple):
    """Where a module's matrices go: our weights, whose outputs are its rows in this order."""

    layer: int
    weights: tuple[str, ...]


def read_adapter(directory: str | Path, config: ModelConfig, most_rank: int | None = None) -> AdapterWeights:
    """An adapter in PEFT's form.

    Args:
        directory: of the adapter.
        config: of the model that it changes, as its checkpoint has it.
        most_rank: the largest rank that there is room for; None: any.

    Raises:
        ModelError: it cannot be read, is of another kind, or does not fit the model.
    """
    directory = Path(directory).expanduser()
    for name in (_CONFIG, _WEIGHTS):
        if not (directory / name).exists():
            raise ModelError(
                "an adapter is a directory that PEFT saved",
                got=f"{directory}, without {name}",
                fix=f"give one with {_CONFIG} and {_WEIGHTS} (`save_pretrained`)",
            )
        check_regular(directory / name)
    stated = PeftConfig.parse(read_json(directory / _CONFIG), directory)
    file = SafetensorsFile.open(directory / _WEIGHTS)
    matrices = {name: file.read(name, slice(None)) for name in file.shapes}
    return adapter_of(matrices, stated, config, most_rank)


def adapter_of(
    matrices: Matrices, stated: PeftConfig | float, config: ModelConfig, most_rank: int | None = None
) -> AdapterWeights:
    """An adapter of matrices with PEFT's names. Other arguments and errors as of `read_adapter`.

    Args:
        stated: the ranks and scales of the modules; or one scale for all, whose ranks are those of their matrices.
    """
    places, layers = modules_of(config), [dict[str, Factors]() for _ in range(config.num_layers)]
    expected = abstract_params(config, jnp.float32, joined=False).layers
    digest, largest = hashlib.sha256(), 0
    for whole, sides in sorted(_modules(matrices).items()):
        module = text_name(whole, config)
        place = _place(module, places, expected)
        shapes = {name: expected[place.layer][name].shape for name in place.weights}
        if isinstance(stated, PeftConfig):
            rank, scale = stated.rank_of(whole), stated.scale_of(whole)
        else:
            rank, scale = (*matrices[sides["A"]].shape, 0)[0], stated
        a, b = (_wide(sides[side], matrices[sides[side]]) for side in "AB")
        _check_shapes(module, a, b, shapes, rank, most_rank)
        with np.errstate(over="ignore"):  # what is too large then is refused where it is written
            b = b * np.float32(scale)
        for part in (a, b):
            digest.update(f"{module} {part.shape} ".encode() + np.ascontiguousarray(part).tobytes())
        start = 0
        if twice := [name for name in shapes if name in layers[place.layer]]:
            raise ModelError(
                "two modules of an adapter change one weight",
                got=f"{', '.join(twice)} of layer {place.layer}, again by {module[:200]}",
                fix="train it again, for modules of this model",
            )
        for name, shape in shapes.items():
            inputs, outputs = shape[: NUM_INPUTS[name]], shape[NUM_INPUTS[name] :]
            rows = b[start : start + math.prod(outputs)]
            start += len(rows)
            layers[place.layer][name] = Factors(a.T.reshape(*inputs, -1), rows.T.reshape(-1, *outputs))
        largest = max(largest, len(a))
    return AdapterWeights(tuple(layers), largest, digest.hexdigest())


def _modules(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of both matrices of every module, by `A` and `B`, by the module's name in PEFT, which its patterns are about.
    Raises `ModelError` for tensors that are none."""
    modules, wrong = dict[str, dict[str, str]](), list[str]()
    for name in names:
        match = TENSOR.fullmatch(name)
        if match is None or not name.startswith(PREFIX):
            wrong.append(name)
        else:
            sides = modules.setdefault(match["module"].removeprefix(PREFIX), {})
            if sides.setdefault(match["side"], name) != name:
                wrong.append(f"{name} beside {sides[match['side']]}")
    wrong += [f"{module} without its other half" for module, sides in modules.items() if len(sides) < 2]
    if wrong or not modules:
        raise ModelError(
            "an adapter has tensors lora_A and lora_B of modules, and nothing else",
            got=_some(wrong) if wrong else "no tensors",
            fix="train a plain LoRA: no embeddings, biases or saved modules",
        )
    return modules


def modules_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our weights, apart, by the names that transformers has for their modules, with `{i}` for the layer."""
    ours = {
        place.name: weight
        for weight, place in names_of(config).layer.items()
        if isinstance(place, StoredTensor) and weight in WEIGHTS
    }
    places = {name: (weight,) for name, weight in ours.items()}
    for whole, parts in FUSED.items():
        bases = {name.removesuffix(parts[0]) for name in ours if name.endswith(parts[0])}
        places |= {
            base + whole: tuple(ours[base + part] for part in parts)
            for base in bases
            if all(base + part in ours for part in parts)
        }
    return {name.removesuffix(".weight"): weights for name, weights in places.items()}


def _place(module: str, places: Mapping[str, tuple[str, ...]], layers: Sequence[Weights]) -> _Place:
    """Where a module's matrices go. Raises `ModelError` for one that the model has not, or that cannot have adapters.

    Args:
        layers: of the model, in the shapes of its checkpoint.
    """
    number = _LAYER.search(module)
    name = module if number is None else f"{module[: number.start()]}.{{i}}.{module[number.end() :]}"
    if ".experts." in module or module.endswith(".experts"):
        raise ModelError(
            "adapters of experts are not served",
            got=module[:200],
            fix="train one for the modules of attention, or merge it into its base model",
        )
    layer = -1 if number is None else int(number[1])
    if name not in places or not 0 <= layer < len(layers):
        modules = ", ".join(sorted({place.rsplit(".", 1)[-1] for place in places}))
        raise ModelError(
            "the model has no such module for an adapter",
            got=f"{module[:200]} of {len(layers)} layers",
            fix=f"train one for {modules} of this model's layers",
        )
    if any(weight not in layers[layer] for weight in places[name]):
        raise ModelError(
            "this layer has experts in place of the module", got=module[:200], fix="train one for attention alone"
        )
    return _Place(layer, places[name])


def _check_shapes(
    module: str,
    a: Float32[np.ndarray, "..."],
    b: Float32[np.ndarray, "..."],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    most_rank: int | None,
) -> None:
    first = next(iter(shapes))
    depth = math.prod(shapes[first][: NUM_INPUTS[first]])
    width = sum(math.prod(shape[NUM_INPUTS[name] :]) for name, shape in shapes.items())
    if (a.shape, b.shape) != ((rank, depth), (width, rank)):
        raise ModelError(
            "an adapter's matrices do not fit the model's weight",
            got=f"{module[:200]}: lora_A {[*a.shape]}, lora_B {[*b.shape]}; "
            f"a weight of {depth} inputs and {width} outputs, rank {rank}",
            fix="use the adapter's own base model",
        )
    if most_rank is not None and rank > most_rank:
        raise ModelError(
            "the adapter's rank is larger than there is room for",
            got=f"rank {rank} of {module[:200]}, room for {most_rank}",
            fix=f"max_lora_rank={rank}",
        )


def _wide(name: str, matrix: Shaped[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """A matrix in float32. Raises `ModelError` for numbers that are none."""
    if not jnp.issubdtype(matrix.dtype, jnp.floating) or not np.isfinite(matrix.astype(np.float32)).all():
        raise ModelError(
            "an adapter's numbers are finite floating-point numbers",
            got=f"{name[:200]} of {matrix.dtype}",
            fix="train it again",
        )
    return matrix.astype(np.float32)


def _some(names: Iterable[str]) -> str:
    listed = [*names]
    more = [f"and {len(listed) - _SHOWN} more"] * (len(listed) > _SHOWN)
    return ", ".join([*(name[:120] for name in listed[:_SHOWN]), *more])
