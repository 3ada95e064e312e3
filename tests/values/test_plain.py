"""Values of JSON texts that can be written as JSON again."""

import json

import pytest

from jinfercept.values.plain import strict_json


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": 1e400}', '{"a": [-1E+999]}', "[1", "'a'"])
def test_what_json_cannot_write_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"no finite number|Expecting"):
        strict_json(text)


def test_json_is_read_as_the_standard_library_reads_it() -> None:
    text = '{"a": [1, -2.5e3, 1e-400, null, true, "NaN"]}'
    assert strict_json(text) == json.loads(text)
