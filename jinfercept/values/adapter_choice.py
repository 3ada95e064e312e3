"""The adapters (LoRA) that options name, and how many there is room for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from jinfercept.errors import ConfigError, shown

MAX_BIAS = 100
"""Of a logit, as in `SamplingParams.logit_bias`."""


class AdapterChoice(NamedTuple):
    """The adapters of a start.

    Attributes:
        directories: by name.
        num_slots: adapters that there is room for.
        of_any_modules: whether that room is for adapters of any modules, loaded later; else for those named alone.
        most_rank: the largest rank that there is room for; None: the largest of those named, or 16 without any.
        of_tools: name of the adapter of chats with tools that name none; None: they have none.
        call_bias: added to the logit with which a call opens in chats that have that adapter and may answer.
    """

    directories: Mapping[str, str]
    num_slots: int
    of_any_modules: bool
    most_rank: int | None
    of_tools: str | None
    call_bias: float

    @classmethod
    def parse(
        cls,
        loras: Sequence[str] | Mapping[str, Any] | None,
        max_loras: int | None,
        max_lora_rank: int | None,
        tool_lora: str | None,
        tool_call_bias: float | None,
    ) -> Self:
        """The adapters of the options with these names. Raises `ConfigError` for values that cannot work together."""
        directories = _directories(loras)
        if max_loras is not None and max_loras < len(directories):
            got, fix = f"{max_loras} for {len(directories)}", f"{len(directories)} or more"
            raise ConfigError("max_loras is less than the number of adapters in loras", got=got, fix=fix)
        num_slots = len(directories) if max_loras is None else max_loras
        if max_lora_rank is not None and not num_slots:
            raise ConfigError("max_lora_rank needs adapters", got="no room for any", fix="give max_loras or loras too")
        if tool_lora is not None and tool_lora not in directories and num_slots == len(directories):
            names = ", ".join(directories) or "none are named"
            raise ConfigError("tool_lora must be a name in loras", got=shown(tool_lora), fix=f"one of loras: {names}")
        bias = tool_call_bias or 0.0
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ConfigError("tool_call_bias is wrong", got=bias, fix=f"a number from -{MAX_BIAS} to {MAX_BIAS}")
        return cls(directories, num_slots, max_loras is not None, max_lora_rank, tool_lora, bias)


def _directories(loras: Sequence[str] | Mapping[str, Any] | None) -> dict[str, str]:
    """The directories by name. Raises `ConfigError` for an entry that is none, and a name given twice."""
    if isinstance(loras, Mapping):
        pairs = [(str(name), str(place)) for name, place in loras.items()]
    else:
        words = [word.partition("=") for word in loras or ()]
        pairs = [(name.strip(), place.strip()) for name, _, place in words]
    if not all(name and place for name, place in pairs):
        raise ConfigError("an adapter has a name and a directory", got=shown(loras), fix="NAME=DIRECTORY for each")
    directories = dict(pairs)
    if len(directories) < len(pairs):
        raise ConfigError("two adapters have one name", got=shown(loras), fix="give each a name of its own")
    return directories
