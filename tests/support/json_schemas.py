"""JSON schemas for property tests."""

from typing import Any

from hypothesis import strategies as st


def closed_objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of objects with no other properties than the declared ones, whose names need escapes and whose order matters."""
    return st.builds(
        lambda some, required: {
            "type": "object",
            "properties": some,
            "required": sorted(some)[:required],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b c", 'd"', "é"]), values, max_size=3),
        st.integers(0, 3),
    )
