"""Keeps one string out of a text, whichever tokens would write it, in addition to a grammar if there is one."""

from collections.abc import Mapping
from functools import cache, cached_property
from typing import final

import numpy as np
from jaxtyping import UInt32

from jinfercept.chat.grammar.constraint import words_of
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.hooks import Constraint, Grammar


@final
class ForbiddenText:
    """The masks of a text in which a string, not empty, never occurs. All requests of one model share them."""

    def __init__(self, text: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._pattern, self._tokenizer, self._vocab_size = text.encode(), tokenizer, vocab_size
        self.mask = cache(self._mask)

    def after(self, matched: int, token_id: int) -> int:
        """Return how many bytes of the string the text ends with after one more token, given the number before it."""
        return self._advance(matched, self._tokenizer.token_bytes(token_id))

    def _advance(self, matched: int, written: bytes) -> int:
        pattern = self._pattern
        text = pattern[:matched] + written
        if pattern in text:
            return len(pattern)
        return next((n for n in range(min(len(pattern), len(text)), 0, -1) if text.endswith(pattern[:n])), 0)

    @cached_property
    def _suspects(self) -> Mapping[int, bytes]:
        # only tokens with the string's last byte can complete it
        tokens = {token_id: self._tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)}
        return {token_id: written for token_id, written in tokens.items() if self._pattern[-1] in written}

    def _mask(self, matched: int) -> UInt32[np.ndarray, "words"]:
        whole, suspects = len(self._pattern), self._suspects.items()
        completing = (token_id for token_id, written in suspects if self._advance(matched, written) == whole)
        return ~words_of(completing, self._vocab_size)


@final
class WithoutText:
    """A grammar whose texts never contain a string."""

    def __init__(self, forbidden: ForbiddenText, grammar: Grammar | None) -> None:
        self._forbidden, self._grammar = forbidden, grammar

    def constrain(self, end_token_ids: frozenset[int]) -> "WithoutTextConstraint":
        inner = self._grammar.constrain(end_token_ids) if self._grammar is not None else None
        return WithoutTextConstraint(self._forbidden, inner)


@final
class WithoutTextConstraint:
    def __init__(self, forbidden: ForbiddenText, inner: Constraint | None) -> None:
        self._forbidden, self._inner, self._matched = forbidden, inner, 0
        self.ended = False

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        mask = self._forbidden.mask(self._matched)
        if self._inner is None:
            return mask
        words = self._inner.allowed()
        self.ended = self._inner.ended
        # where the grammar allows only tokens that complete the string, they are allowed
        both = words & mask
        return both if both.any() else words

    def accept(self, token_id: int) -> None:
        self._matched = self._forbidden.after(self._matched, token_id)
        if self._inner is not None:
            self._inner.accept(token_id)
            self.ended = self._inner.ended
