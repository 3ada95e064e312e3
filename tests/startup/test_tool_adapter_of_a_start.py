"""When a start has the adapter with which the embedded model calls tools."""

from typing import Any

import pytest

from jinfercept.models.embedded import NAME, TOOL_CALL_BIAS, tool_adapter
from jinfercept.startup.served_adapters import with_tool_adapter


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
