"""Ends numbers that a grammar lets go on without end: small models at temperature 0 write digits until they are cut off.

llguidance has no bound for the digits of a number. Here numbers are told from texts by what the grammar lets follow.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

import numpy as np
from jaxtyping import UInt32

MOST_DIGITS = {b"": 19, b".": 17, b"e": 3}
"""Digits in a row: of a whole number or before the point, of a fraction, and of an exponent. A 64-bit integer has 19; 17 tell
every double from its neighbours."""
_MOST_ZEROS = 14
"""Zeros in a row behind other digits, where more digits have to follow."""
TAIL_BYTES = 48
"""Bytes of the text that `DigitLimit` has to see: more than the digits that it allows."""

_RUN = re.compile(rb"([.eE]?)[-+]?([0-9]+)\Z")
_DIGITS = b"0123456789"
_MARKS = frozenset(b'abcdfghijklmnopqrstuvwxyz"')


@final
class DigitLimit:
    """The masks that end numbers. Shared by all grammars over one vocabulary.

    Args:
        token_bytes: the bytes that a token adds to the text.
        vocab_size: see `Grammars`.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int) -> None:
        self.token_bytes, self._vocab_size = token_bytes, vocab_size

    def limited(self, words: UInt32[np.ndarray, "words"], tail: bytes, may_end: bool) -> UInt32[np.ndarray, "words"]:
        """The tokens of `words` without digits beyond the limit, unless the text is no number or needs them.

        Args:
            words: the tokens that the grammar allows; bits as in `TokenConstraint.allowed`.
            tail: the last bytes of the text.
            may_end: the text may end here.
        """
        run = _RUN.search(tail) if tail[-1:].isdigit() else None
        if run is None or (words & self._text).any():
            return words
        digits = run[2]
        zeros = len(digits) - len(digits.rstrip(b"0"))
        needs_digit = not may_end and not (words & self._short[0]).any()
        if needs_digit:  # as 0.000… does, which has to exceed 0; more zeros would be lost in a double
            enough = MOST_DIGITS[b"."] if zeros == len(digits) else _MOST_ZEROS
            other = words & self._no_zero if run[1] == b"." and zeros >= enough else words
            return other if other.any() else words
        left = max(0, MOST_DIGITS[run[1].lower()] - len(digits))
        return words & self._short[min(left, len(self._short) - 1)]

    @cached_property
    def _tokens(self) -> Sequence[bytes]:
        return [self.token_bytes(token_id) for token_id in range(self._vocab_size)]

    @cached_property
    def _text(self) -> UInt32[np.ndarray, "words"]:
        """The letters and marks of which one may follow digits in a text or a string, and none in a number."""
        return token_mask([len(token) == 1 and token[0] in _MARKS for token in self._tokens])

    @cached_property
    def _short(self) -> list[UInt32[np.ndarray, "words"]]:
        """The tokens that begin with no more digits than an index says; the last one is all tokens."""
        digits = np.array([len(token) - len(token.lstrip(_DIGITS)) for token in self._tokens])
        return [token_mask(digits <= most) for most in range(int(digits.max()) + 1)]

    @cached_property
    def _no_zero(self) -> UInt32[np.ndarray, "words"]:
        return token_mask([not token.startswith(b"0") for token in self._tokens])


def token_mask(chosen: Sequence[bool] | np.ndarray) -> UInt32[np.ndarray, "words"]:
    """The bits of a mask from a truth value for each token."""
    bits = np.zeros(-(-len(chosen) // 32) * 32, np.bool_)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.uint32)
