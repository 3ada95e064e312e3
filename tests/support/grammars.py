"""What tests of grammars share: an end token, the tokens that a mask allows."""

from typing import Any

import numpy as np
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


END = 1


def ids(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
