"""`speculative_config`: drafts of the next tokens, with vLLM's names."""

import json
from typing import Any, NamedTuple, Self

from jinfercept.errors import ConfigError, shown

_SPECULATIVE_EXAMPLE = 'such as {"method": "ngram", "num_speculative_tokens": 4}'
_DRAFT_MODEL_EXAMPLE = 'such as {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 4}'


class SpeculativeConfig(NamedTuple):
    """Drafts of the next tokens, which a step verifies; names and meaning as vLLM's.

    Attributes:
        method: ngram: what followed the last tokens where they occurred before, in the prompt, results of calls or the output;
            draft_model: what a smaller model writes.
        num_speculative_tokens: most drafts of a sequence in a step; 0: none.
        prompt_lookup_max, prompt_lookup_min: of `ngram`: tokens of the longest and of the shortest n-gram that is looked up.
        model: the one that drafts, by name or path as `LLM` takes it. It has the served model's tokens.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    model: str | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None) -> Self:
        """Reads a mapping or its JSON; None asks for no drafts. Raises `ConfigError`."""
        flag = "speculative_config"
        if value is None:
            return cls()
        try:
            values: Any = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ConfigError(f"{flag} is no JSON", got=str(error), fix=_SPECULATIVE_EXAMPLE) from None
        if not isinstance(values, dict):
            raise ConfigError(f"{flag} is an object", got=shown(values), fix=_SPECULATIVE_EXAMPLE)
        if unknown := sorted(set(values) - set(cls._fields)):
            raise ConfigError(f"{flag} has the keys {', '.join(cls._fields)}", got=", ".join(unknown), fix="no others")
        model = values.get("model")
        values = {"method": "ngram" if model is None else "draft_model", **values}
        config = cls(**values)
        if config.method not in ("ngram", "draft_model"):
            raise ConfigError(f"the method of {flag} is unknown", got=shown(config.method), fix="ngram or draft_model")
        if config.method == "ngram" and model is not None:
            raise ConfigError(f"{flag} has n-grams of a model", got=shown(value), fix="leave out model, or draft_model")
        if config.method == "draft_model" and not (isinstance(model, str) and model):
            raise ConfigError(f"{flag} lacks the draft model", got=shown(value), fix=_DRAFT_MODEL_EXAMPLE)
        if not all(type(number) is int and number >= 1 for number in config[1:4]):
            raise ConfigError(f"{flag} has whole numbers from 1 on", got=shown(value), fix=_SPECULATIVE_EXAMPLE)
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        if "prompt_lookup_min" not in values:
            shortest = min(shortest, longest)
        if "prompt_lookup_max" not in values:
            longest = max(shortest, longest)
        if shortest > longest:
            raise ConfigError("prompt_lookup_min is more than prompt_lookup_max", got=shown(value), fix="lower it")
        return config._replace(prompt_lookup_min=shortest, prompt_lookup_max=longest)
