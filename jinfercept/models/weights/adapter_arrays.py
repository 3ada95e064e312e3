"""Adapters whose matrices are arrays in memory, by PEFT's names or by ours."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jinfercept.errors import ModelError
from jinfercept.models.adapters import AdapterWeights
from jinfercept.models.config import ModelConfig
from jinfercept.models.peft_adapter import PREFIX, adapter_of, modules_of
from jinfercept.models.weight_axes import NUM_INPUTS
from jinfercept.models.weights.named import WeightTree, arrays_by_name, check_leaf
from jinfercept.values import plain

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
