"""When a start has the adapter with which the embedded model calls tools; options of adapters that contradict each other."""

from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.models.embedded import NAME, TOOL_CALL_BIAS, tool_adapter
from jinfercept.start.served_adapters import with_tool_adapter
from tests.support.tiny_model import tiny_llm


def test_the_embedded_model_has_it_where_no_option_of_adapters_is_given() -> None:
    flags = with_tool_adapter(NAME, {"max_num_seqs": 4, "loras": None})
    adapter = {"loras": {"tools": str(tool_adapter())}, "tool_lora": "tools"}
    assert flags == {"max_num_seqs": 4, **adapter, "tool_call_bias": TOOL_CALL_BIAS}
    assert with_tool_adapter(NAME, {"tool_call_bias": 0.0}) == {**adapter, "tool_call_bias": 0.0}


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("another/model", {"max_num_seqs": 4}),
        (NAME, {"loras": {"mine": "here"}}),
        (NAME, {"max_loras": 2}),
        (NAME, {"load_format": "dummy"}),
    ],
)
def test_other_starts_are_as_their_options_say(model: str, flags: dict[str, Any]) -> None:
    assert with_tool_adapter(model, flags) == flags


def test_no_name_is_a_start_without_it() -> None:
    assert with_tool_adapter(NAME, {"tool_lora": "", "max_num_seqs": 4}) == {"max_num_seqs": 4}


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
