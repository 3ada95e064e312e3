"""Options of adapters that contradict each other."""

from typing import Any

import pytest

from jinfercept.errors import ConfigError
from tests.support.tiny_model import tiny_llm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loras": ["a"]}, "a name and a directory"),
        ({"loras": ["a=x", "a=y"]}, "two adapters have one name"),
        ({"loras": 3}, "loras is a list of texts"),
        (
            {"loras": ["a=x", "b=y"], "max_loras": 1},
            "max_loras is less than the number of adapters in loras; got 1 for 2",
        ),
        ({"max_loras": 0}, "max_loras is too small"),
        ({"max_lora_rank": 8}, "max_lora_rank needs adapters"),
        (
            {"tool_call_bias": -1.0},
            "tool_call_bias needs tool_lora; got no tool_lora; fix: give tool_lora too",
        ),
        (
            {"loras": ["a=x"], "tool_lora": "a", "tool_call_bias": -200.0},
            "tool_call_bias is wrong; got -200.0; fix: a number from -100 to 100",
        ),
        ({"loras": ["a=x"], "tool_lora": "b"}, "tool_lora must be a name in loras; got 'b'; fix: one of loras: a"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(**options)
