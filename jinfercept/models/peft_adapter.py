"""Reads adapters as PEFT saves them: a directory with `adapter_config.json` and `adapter_model.safetensors`. What PEFT can
train and this cannot serve is refused: an adapter never counts in part."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Shaped
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema

from jinfercept.errors import ModelError, shown
from jinfercept.models.adapters import WEIGHTS, AdapterWeights, Factors
from jinfercept.models.checkpoint import StoredTensor
from jinfercept.models.config import ModelConfig
from jinfercept.models.hf_weights import FUSED, names_of
from jinfercept.models.model import abstract_params
from jinfercept.models.model_directory import check_regular, read_json
from jinfercept.models.named_weights import WeightTree, arrays_by_name, check_leaf
from jinfercept.models.protocol import Weights
from jinfercept.models.weight_axes import NUM_INPUTS
from jinfercept.models.weight_files import SafetensorsFile, text_name
from jinfercept.values import plain

_MEANINGLESS = frozenset(
    {
        *(
            "peft_type",
            "init_lora_weights",
            "auto_mapping",
            "base_model_name_or_path",
            "revision",
            "task_type",
            "inference_mode",
            "peft_version",
        ),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors say where it is
        *("lora_dropout", "eva_config", "runtime_config", "ephemeral_gpu_offload", "qalora_group_size"),
        *("megatron_core", "ensure_weight_tying"),
    }
)
_HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` after which the base's weights are as they were."""
_SHOWN = 5
_MOST_PATTERNS = 1024
_Rank = Annotated[int, Field(strict=True, gt=0, lt=1 << 31)]
_Alpha = Annotated[float, Field(strict=True, gt=0, lt=1 << 31)]


@lru_cache(2 * _MOST_PATTERNS)
def _matcher(pattern: str) -> SchemaValidator:
    # as PEFT matches names; Rust's expressions take linear time, whatever an adapter from elsewhere asks for
    return SchemaValidator(core_schema.str_schema(pattern=rf"^(.*\.)?({pattern})$"))


def _checked_pattern(pattern: str) -> str:
    try:
        _matcher(pattern)
    except SchemaError as error:
        raise ValueError(
            f"{pattern[:80]!r} is no regular expression without look-around and back-references"
        ) from error
    return pattern


_Module = Annotated[str, AfterValidator(_checked_pattern)]
"""A regular expression for a module's name, or for its end behind a dot."""


class PeftConfig(BaseModel):
    """The ranks of an adapter's modules and the scales of their products, as PEFT writes them."""

    model_config = ConfigDict(frozen=True)

    r: _Rank
    lora_alpha: _Alpha
    use_rslora: StrictBool = False
    rank_pattern: dict[_Module, _Rank] = Field({}, max_length=_MOST_PATTERNS)
    alpha_pattern: dict[_Module, _Alpha] = Field({}, max_length=_MOST_PATTERNS)

    @classmethod
    def parse(cls, config: Any, directory: Path) -> Self:
        """The values of a parsed file. Raises `ModelError` for what is not served."""
        if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, Mapping) else config
            raise ModelError("only adapters of type LORA are served", got=shown(kind), fix="train a LoRA adapter")
        start = config.get("init_lora_weights", True)
        if start not in _HARMLESS_STARTS:
            raise ModelError(
                "an adapter that was started from parts of the base's weights changes these too",
                got=f"init_lora_weights={shown(start)} in {directory}",
                fix="save it with path_initial_model_for_weight_conversion of PEFT, which makes it a plain adapter",
            )
        unserved = {
            key: value
            for key, value in config.items()
            if key not in cls.model_fields.keys() | _MEANINGLESS and value and value != "none"
        }
        if unserved:
            raise ModelError(
                "the adapter uses features that are not supported",
                got=", ".join(f"{key[:40]}={shown(value)[:40]}" for key, value in [*unserved.items()][:_SHOWN]),
                fix="train a plain LoRA: no DoRA, no biases, no modules_to_save, no tokens of its own",
            )
        try:
            return cls.model_validate({key: value for key, value in config.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part)[:80] for part in first["loc"])
            raise ModelError(
                f"{place} of adapter_config.json is wrong: {first['msg']}",
                got=shown(first["input"]),
                fix=f"correct the file in {directory}",
            ) from error

    def rank_of(self, module: str) -> int:
        return _of_module(module, self.rank_pattern, self.r)

    def scale_of(self, module: str) -> float:
        """The factor of a module's product."""
        rank, alpha = self.rank_of(module), _of_module(module, self.alpha_pattern, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _of_module[N: float](module: str, numbers: Mapping[str, N], default: N) -> N:
    # the first pattern that fits counts, as in PEFT
    return next((number for pattern, number in numbers.items() if _matcher(pattern).isinstance_python(module)), default)


_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_LAYER = re.compile(r"\.(0|[1-9][0-9]{0,8})\.")


type Matrices = Mapping[str, Shaped[np.ndarray, "..."]]
"""An adapter's matrices by PEFT's names."""


class _Place(NamedTuple):
    layer: int
    weights: tuple[str, ...]  # ours, whose outputs are the module's rows in this order


def read_adapter(directory: str | Path, config: ModelConfig, most_rank: int | None = None) -> AdapterWeights:
    """An adapter in PEFT's form, for a model with this config, as its checkpoint has it. `most_rank` is the largest rank that
    there is room for; None: any. Raises `ModelError` if it cannot be read, is of another kind, or does not fit the model."""
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
    """An adapter of matrices with PEFT's names. `stated` has the ranks and scales of the modules, or is one scale for all,
    whose ranks are those of their matrices. Other arguments and errors are those of `read_adapter`."""
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
    """Names of both matrices of every module, by `A` and `B`, by the module's name in PEFT, which PEFT's patterns match."""
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
            fix=f"train a plain LoRA: no embeddings, biases or saved modules, and names that begin with {PREFIX}",
        )
    return modules


def modules_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our unjoined weights by the names that transformers has for their modules, with `{i}` for the layer."""
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


_OURS = re.compile(r"layers\.(?P<layer>[0-9]+)\.(?P<weight>[a-z_]+)\.(?P<side>[ab])")


def adapter_in_memory(
    config: ModelConfig, matrices: WeightTree, scale: float, names: Mapping[str, str] | None, most_rank: int
) -> AdapterWeights:
    """An adapter of matrices for a model of this config, as its checkpoint has it.

    Args:
        matrices: by PEFT's names (`….q_proj.lora_A.weight`, `[rank, inputs]`), or by ours: `layers.0.q.a` `[*inputs, rank]` and
            `layers.0.q.b`, `[rank, *outputs]`.
        scale: of the products: `lora_alpha / rank`.
        names: as of `params_by_name`.

    Raises:
        ModelError: a name is none of a module that can have adapters, a matrix has another shape, or the scale is no number.
    """
    if type(scale := plain(scale)) not in (int, float) or not np.isfinite(scale):
        raise ModelError("the scale of an adapter is a number", got=repr(scale)[:80], fix="lora_alpha / rank")
    arrays = arrays_by_name(matrices, names)
    for name, leaf in arrays.items():
        check_leaf(name, leaf, (np.floating,))
    modules = {weights[0]: module for module, weights in modules_of(config).items() if len(weights) == 1}
    by_peft = dict(_named_by_peft(modules, name, leaf) for name, leaf in arrays.items())
    return adapter_of(by_peft, scale, config, most_rank)


def _named_by_peft(modules: Mapping[str, str], name: str, matrix: Any) -> tuple[str, Float[np.ndarray, "..."]]:
    array = np.asarray(matrix)
    if (match := _OURS.fullmatch(name)) is None:
        return name if name.startswith(PREFIX) else PREFIX + name, array
    weight, is_a = match["weight"], match["side"] == "a"
    if weight not in modules or array.ndim < 2 or not array.size:
        fix = f"matrices of {', '.join(modules)}"
        raise ModelError("this is not a matrix of an adapter", got=f"{name} {[*array.shape]}", fix=fix)
    inputs = NUM_INPUTS[weight] if is_a else 1
    array = array.reshape(int(np.prod(array.shape[:inputs])), -1).T
    return f"{PREFIX}{modules[weight].format(i=match['layer'])}.lora_{match['side'].upper()}.weight", array
