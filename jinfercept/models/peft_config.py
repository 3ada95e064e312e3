"""Reads an adapter's `adapter_config.json`: ranks and scales of its modules, as PEFT writes them.

Every key that could change an output and is not understood is refused, and so is a value of another type than PEFT's.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinfercept.errors import ModelError, shown

_UNDERSTOOD = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_MEANINGLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors say where it is
        *("lora_dropout", "eva_config", "runtime_config", "ephemeral_gpu_offload", "qalora_group_size"),
        *("megatron_core", "ensure_weight_tying"),
    }
)
_KINDS: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "true or false": ((bool,), ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "inference_mode")),
    "a whole number": ((int,), ("r",)),
    "a number": ((int, float), ("lora_alpha", "lora_dropout")),
    "an object with numbers": ((dict,), ("rank_pattern", "alpha_pattern")),
    "a list of names, or a name": ((list, str), ("target_modules", "exclude_modules", "modules_to_save")),
    "a text": ((str,), ("bias",)),
}
"""Types of values, as PEFT writes them, and the keys that have such a value or null."""
_HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` after which the base's weights are as they were."""
_MOST = 1 << 31
"""Ranks and `lora_alpha` are smaller."""
_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_REPEATS, _MOST_IN_ONE, _SHOWN = 1 << 12, 200, 128, 3, 5


class _ModulePatterns(NamedTuple):
    numbers: list[tuple[re.Pattern[str], Any]]

    @classmethod
    def parse(cls, numbers: Mapping[str, Any]) -> Self:
        # names are matched by backtracking, which tries all ways in which repetitions and choices can be combined
        repeats = [len(re.findall(r"[*+?{(]", pattern)) for pattern in numbers]
        many = len(numbers) > _MOST_PATTERNS or sum(repeats) > _MOST_REPEATS or max(repeats, default=0) > _MOST_IN_ONE
        if many or any(len(pattern) > _MOST_CHARACTERS or re.search(r"\)[*+{]", pattern) for pattern in numbers):
            raise ModelError(
                "the adapter has too many or too complex patterns",
                got=f"{len(numbers)}: {', '.join(pattern[:80] for pattern in [*numbers][:_SHOWN])}",
                fix="write names of modules as patterns in adapter_config.json",
            )
        try:
            return cls([(re.compile(rf"(.*\.)?({pattern})$"), number) for pattern, number in numbers.items()])
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(
                "a pattern of the adapter is no regular expression",
                got=str(error)[:200],
                fix="correct adapter_config.json",
            ) from error

    def of(self, module: str, default: float) -> Any:
        # the first pattern that fits counts, as in PEFT
        return next((number for pattern, number in self.numbers if pattern.match(module)), default)


class PeftConfig(NamedTuple):
    """The ranks of an adapter's modules and the scales of their products."""

    rank: int
    alpha: float
    root: bool
    ranks: _ModulePatterns
    alphas: _ModulePatterns

    @classmethod
    def parse(cls, config: Any, directory: Path) -> Self:
        """The values of a parsed file. Raises `ModelError`, which names the directory, for what is not served."""
        if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, Mapping) else config
            raise ModelError("only adapters of type LORA are served", got=shown(kind), fix="train a LoRA adapter")
        for kind, (types, keys) in _KINDS.items():
            if wrong := [key for key in keys if type(config.get(key)) not in (*types, type(None))]:
                got = ", ".join(f"{key}={shown(config[key])}" for key in wrong)
                raise ModelError(
                    f"{' and '.join(wrong)} of adapter_config.json is {kind}", got=got, fix="correct the file"
                )
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
            if key not in _UNDERSTOOD | _MEANINGLESS | {"init_lora_weights"} and value and value != "none"
        }
        if unserved:
            raise ModelError(
                "the adapter uses features that are not supported",
                got=", ".join(f"{key[:40]}={shown(value)[:40]}" for key, value in [*unserved.items()][:_SHOWN]),
                fix="train a plain LoRA: no DoRA, no biases, no modules_to_save, no tokens of its own",
            )
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        rank, alpha = config.get("r"), config.get("lora_alpha")
        numbers: list[Any] = [rank, alpha, *ranks.values(), *alphas.values()]
        right = all(type(number) in (int, float) and 0 < number < _MOST for number in numbers)
        if not right or not all(type(number) is int for number in ranks.values()):
            raise ModelError(
                "ranks and lora_alpha of an adapter are numbers above 0, ranks whole ones, and none is huge",
                got=f"r={shown(rank)}, lora_alpha={shown(alpha)}, {shown({**ranks, **alphas})} in {directory}",
                fix="correct adapter_config.json",
            )
        of_modules = _ModulePatterns.parse(ranks), _ModulePatterns.parse(alphas)
        return cls(rank, alpha, bool(config.get("use_rslora")), *of_modules)  # pyright: ignore[reportArgumentType]

    def rank_of(self, module: str) -> int:
        return self.ranks.of(module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's product."""
        rank, alpha = self.rank_of(module), self.alphas.of(module, self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank
