"""What tests of grammars share: an end token, a grammar source of tools, the tokens that a mask allows."""

from typing import NamedTuple

import numpy as np

END = 1


class FromTools(NamedTuple):
    """The calls of a client's tools, in Lark."""

    text: str

    @property
    def source(self) -> tuple[str, str]:
        return "lark", self.text


def ids(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
