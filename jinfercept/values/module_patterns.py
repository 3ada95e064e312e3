"""Numbers of a model's modules by regular expressions of their names, as PEFT writes them (`rank_pattern`, `alpha_pattern`)."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from jinfercept.errors import ModelError

_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_REPEATS, _MOST_IN_ONE, _SHOWN = 1 << 12, 200, 128, 3, 5


class ModulePatterns(NamedTuple):
    """Compiled patterns with their numbers."""

    numbers: list[tuple[re.Pattern[str], Any]]

    @classmethod
    def parse(cls, numbers: Mapping[str, Any]) -> Self:
        """The patterns of a file. Raises `ModelError` for one that is none, and for what may take long to match: names are
        matched by backtracking, which tries all ways in which repetitions and choices can be combined."""
        repeats = [len(re.findall(r"[*+?{(]", pattern)) for pattern in numbers]
        many = len(numbers) > _MOST_PATTERNS or sum(repeats) > _MOST_REPEATS or max(repeats, default=0) > _MOST_IN_ONE
        if many or any(len(pattern) > _MOST_CHARACTERS or re.search(r"\)[*+{]", pattern) for pattern in numbers):
            raise ModelError(
                "patterns of an adapter are few and simple",
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
        """A module's number: that of the first pattern that fits, as PEFT finds it."""
        return next((number for pattern, number in self.numbers if pattern.match(module)), default)
