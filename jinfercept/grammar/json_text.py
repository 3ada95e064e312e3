"""What llguidance leaves without bound in JSON: digits of numbers, and names that an object has already.

A small model at temperature 0 repeats a digit or a name of an object until `max_tokens`. A number is told from a string by the
tokens that the grammar allows next, so numbers are also recognised within calls, of which only the arguments are JSON.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import final

import numpy as np
from jaxtyping import UInt32

_MOST_DIGITS = {b"": 19, b".": 17, b"e": 3}
"""Digits in a row: of a whole number or before the point, of a fraction, and of an exponent. A 64-bit integer has 19; 17 tell
every double from its neighbours."""
_MOST_ZEROS = 14
"""Zeros in a fraction behind other digits, where more digits have to follow: later ones would be lost in a double."""
_TAIL_BYTES = 48
_RUN = re.compile(rb"([.eE]?)[-+]?([0-9]+)\Z")
_NO_NUMBER = {letter.encode() for letter in 'abcdfghijklmnopqrstuvwxyz"'}
"""Tokens that may follow digits in a string, and never in a number."""


@final
class JsonTokens:
    """The masks by which `JsonText` limits a text. Shared by all grammars over one vocabulary.

    Args:
        token_bytes: the bytes that a token adds to the text.
        vocab_size: see `Grammars`.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int) -> None:
        self.token_bytes, self.vocab_size = token_bytes, vocab_size
        self.without = lru_cache(maxsize=256)(self._without)

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted(zip(self._tokens, range(self.vocab_size), strict=True))

    def _without(self, start: bytes) -> UInt32[np.ndarray, "words"]:
        """The tokens that do not begin with a text."""
        others = np.ones(self.vocab_size, np.bool_)
        for written, token_id in self._sorted[bisect_left(self._sorted, (start, -1)) :]:
            if not written.startswith(start):
                break
            others[token_id] = False
        return _mask(others)

    @cached_property
    def ids_of(self) -> dict[bytes, list[int]]:
        """The tokens of a text."""
        ids: dict[bytes, list[int]] = {}
        for written, token_id in self._sorted:
            ids.setdefault(written, []).append(token_id)
        return ids

    @cached_property
    def no_number(self) -> UInt32[np.ndarray, "words"]:
        return _mask([token in _NO_NUMBER for token in self._tokens])

    @cached_property
    def short(self) -> list[UInt32[np.ndarray, "words"]]:
        """The tokens that begin with no more digits than an index says; the last one is all tokens."""
        digits = np.array([len(token) - len(token.lstrip(b"0123456789")) for token in self._tokens])
        return [_mask(digits <= most) for most in range(int(digits.max()) + 1)]


@final
class JsonText:
    """One text that is JSON, or has JSON in it.

    Args:
        whole: all of it is JSON.
        has_patterns: a schema has patterns for names.

    Attributes:
        tokens: of its vocabulary.
        has_limits: `limited` may leave tokens out.
    """

    def __init__(self, tokens: JsonTokens, *, whole: bool, has_patterns: bool) -> None:
        self.tokens, self._whole, self.has_patterns = tokens, whole, has_patterns
        self._tail = b""  # more bytes than a number has
        self._open: list[set[bytes] | None] = []  # names of each open object; None for a list
        self._string: bytes | None = None  # of the open string
        self._escaped = self._is_name = self.has_limits = False  # the next character; the open or next string

    def copy(self) -> "JsonText":
        copied = copy(self)
        copied._open = [None if names is None else {*names} for names in self._open]
        return copied

    def add(self, token_id: int) -> None:
        """The next token of the text."""
        written = self.tokens.token_bytes(token_id)
        self._tail = (self._tail + written)[-_TAIL_BYTES:]
        for at in range(len(written) if self._whole else 0):
            self._add_byte(written[at : at + 1])
        self.has_limits = self._tail[-1:].isdigit() or bool(self._is_name and self._open and self._open[-1])

    def _add_byte(self, char: bytes) -> None:
        if self._string is not None:
            if char != b'"' or self._escaped:
                self._string += char
                self._escaped = char == b"\\" and not self._escaped
                return
            if self._is_name and self._open and (names := self._open[-1]) is not None:
                names.add(self._string)
            self._string = None
        elif char == b'"':
            self._string = b""
        elif char in (b"{", b"["):
            self._open.append(set() if char == b"{" else None)
            self._is_name = char == b"{"
        elif char in (b"}", b"]") and self._open:
            self._open.pop()
        elif char in (b":", b","):
            self._is_name = char == b"," and bool(self._open) and self._open[-1] is not None

    @property
    def repeats(self) -> list[bytes]:
        """What would complete the open or next name to those that its object has already; each ends with its quote."""
        if not self._is_name or not self._open or not self._open[-1]:
            return []
        opening, written = (b'"', b"") if self._string is None else (b"", self._string)
        return [opening + name[len(written) :] + b'"' for name in self._open[-1] if name.startswith(written)]

    def limited(self, words: UInt32[np.ndarray, "words"], may_end: bool) -> UInt32[np.ndarray, "words"]:
        """The tokens of `words` without further digits and names that come again, unless nothing else may follow.

        Args:
            words: the tokens that the grammar allows; bits as in `TokenConstraint.allowed`.
            may_end: the text may end here.
        """
        tokens = self.tokens
        for rest in self.repeats:
            others = words & tokens.without(rest)
            words = others if others.any() else words
        run = _RUN.search(self._tail) if self._tail[-1:].isdigit() else None
        if run is None or (words & tokens.no_number).any():
            return words
        mark, digits = run[1].lower(), run[2]
        if may_end or (words & tokens.short[0]).any():
            left = max(0, _MOST_DIGITS[mark] - len(digits))
            return words & tokens.short[min(left, len(tokens.short) - 1)]
        zeros = len(digits) - len(digits.rstrip(b"0"))
        if mark == b"." and zeros >= (_MOST_DIGITS[mark] if zeros == len(digits) else _MOST_ZEROS):
            others = words & tokens.without(b"0")  # as in 0.000…, which has to exceed 0
            return others if others.any() else words
        return words


def _mask(chosen: Sequence[bool] | np.ndarray) -> UInt32[np.ndarray, "words"]:
    bits = np.zeros(-(-len(chosen) // 32) * 32, np.bool_)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.uint32)
