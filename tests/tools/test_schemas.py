"""Arguments are checked against the whole schema of their tool, with the formats and constraints that no grammar holds."""

from pathlib import Path
from typing import Any

import pytest

from jinfercept.tools.calls import CallFailed
from jinfercept.tools.schemas import check_of
from jinfercept.tools.tool_tables import Place


@pytest.mark.parametrize(
    ("schema", "wrong", "right"),
    [
        ({"type": "array", "uniqueItems": True}, [1, 1], [1, 2]),
        ({"type": "string", "format": "regex"}, "((", "a+"),
        ({"type": "integer", "minimum": 10**25}, 10**24, 10**26),
        ({"type": "string", "pattern": "^(?=a)"}, "b", "a"),
    ],
    ids=str,
)
def test_what_no_grammar_holds_is_checked(schema: Any, wrong: Any, right: Any) -> None:
    check = check_of({"type": "object", "properties": {"x": schema}}, Place(Path("tools.toml"), 1))
    check({"x": right})
    with pytest.raises(CallFailed, match="the arguments do not fit: x: "):
        check({"x": wrong})


def test_a_schema_may_name_an_older_draft() -> None:
    pair = {"type": "array", "items": [{"type": "string"}], "additionalItems": False}
    draft = "http://json-schema.org/draft-07/schema#"
    check = check_of({"$schema": draft, "type": "object", "properties": {"x": pair}}, Place(Path("tools.toml"), 1))
    check({"x": ["a"]})
    with pytest.raises(CallFailed, match="the arguments do not fit: x"):
        check({"x": ["a", "b"]})
