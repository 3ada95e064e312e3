"""Names of members that a JSON text has: llguidance lets a model write one twice, and at temperature 0 again and again."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import final

import numpy as np
from jaxtyping import UInt32

from jinfercept.grammar.digits import token_mask


@final
class TokensByText:
    """Finds the tokens that begin with a text. Shared by all grammars over one vocabulary.

    Args:
        token_bytes: the bytes that a token adds to the text.
        vocab_size: see `Grammars`.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int) -> None:
        self.token_bytes, self._vocab_size = token_bytes, vocab_size
        self.others = lru_cache(maxsize=256)(self._others)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((self.token_bytes(token_id), token_id) for token_id in range(self._vocab_size))

    def _others(self, start: bytes) -> UInt32[np.ndarray, "words"]:
        """The tokens that do not begin with a text."""
        others = np.ones(self._vocab_size, np.bool_)
        for at in range(bisect_left(self._sorted, (start, -1)), self._vocab_size):
            written, token_id = self._sorted[at]
            if not written.startswith(start):
                break
            others[token_id] = False
        return token_mask(others)


@final
class MemberNames:
    """The names in the objects that are open in a JSON text, as they are written."""

    def __init__(self, tokens: TokensByText) -> None:
        self._tokens = tokens
        self._open: list[set[bytes] | None] = []  # names of each open object; None for a list
        self._string: bytes | None = None  # of the open string
        self._escaped = self._is_name = False  # the next character; the open or next string

    def copy(self) -> "MemberNames":
        copied = MemberNames(self._tokens)
        copied._open = [None if names is None else {*names} for names in self._open]
        copied._string, copied._escaped, copied._is_name = self._string, self._escaped, self._is_name
        return copied

    def add(self, token_id: int) -> None:
        """The next token of the text."""
        for char in self._tokens.token_bytes(token_id).decode("latin-1"):
            if self._string is not None:
                if char == '"' and not self._escaped:
                    if self._is_name and self._open and (names := self._open[-1]) is not None:
                        names.add(self._string)
                    self._string = None
                else:
                    self._string += char.encode("latin-1")
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._string = b""
            elif char in "{[":
                self._open.append(set() if char == "{" else None)
                self._is_name = char == "{"
            elif char in "}]" and self._open:
                self._open.pop()
            elif char in ":,":
                self._is_name = char == "," and bool(self._open) and self._open[-1] is not None

    def limited(self, words: UInt32[np.ndarray, "words"]) -> UInt32[np.ndarray, "words"]:
        """The tokens of `words` without those that complete a name that the object has, unless there is no other."""
        if self._is_name and self._open and self._open[-1]:
            opening, written = (b'"', b"") if self._string is None else (b"", self._string)
            for name in self._open[-1]:
                if name.startswith(written):
                    others = words & self._tokens.others(opening + name[len(written) :] + b'"')
                    words = others if others.any() else words
        return words
