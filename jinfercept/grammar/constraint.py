"""A compiled grammar, and the state of a text within it: which tokens may come next. Masks are words of bits."""

from typing import final

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher

from jinfercept.errors import GrammarError, RequestError
from jinfercept.grammar.json_text import JsonText, JsonTokens


@final
class TokenGrammar:
    """A compiled grammar.

    Args:
        matcher: its state at the beginning of a text.
        vocab_size: see `Grammars`.
        json: of an empty text; None if a text has no JSON.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, json: JsonText | None) -> None:
        self._matcher, self._vocab_size, self._json = matcher, vocab_size, json

    def constrain(self, end_token_ids: frozenset[int]) -> "TokenConstraint":
        """The constraint of an empty text.

        Args:
            end_token_ids: tokens that end it where the grammar lets it end; empty for a text that ends only where nothing
                can follow.
        """
        json = self._json and self._json.copy()
        return TokenConstraint(self._matcher.deep_copy(), self._vocab_size, end_token_ids, json)


@final
class TokenConstraint:
    """The state of one text within a grammar.

    Attributes:
        ended: only the end can follow.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, end_token_ids: frozenset[int], json: JsonText | None
    ) -> None:
        self._matcher, self._vocab_size, self._end_token_ids, self._json = matcher, vocab_size, end_token_ids, json
        self._end = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in end_token_ids:
            if 0 <= token_id < vocab_size:
                self._end[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._allowed: UInt32[np.ndarray, "words"] | None = None  # of the next token, once computed
        self.ended = False

    def copy(self) -> "TokenConstraint":
        """The same state; what it accepts does not change this one."""
        json = self._json and self._json.copy()
        copied = TokenConstraint(self._matcher.deep_copy(), self._vocab_size, self._end_token_ids, json)
        copied.ended = self.ended
        return copied

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next: bit `v % 32` of word `v // 32` for token `v`.

        Raises:
            GrammarError: no token can continue the text and it may not end here, or the grammar is too complex.
        """
        if self.ended:
            return self._end
        words = next_tokens(self._matcher, self._vocab_size)
        self.ended = not words.any()
        accepting = self._matcher.is_accepting()
        if self._json is not None and self._json.has_limits:
            words = self._json.limited(words, may_end=accepting and bool(self._end.any()))
            if self._json.has_patterns and (repeats := self._json.repeats):
                others = other_names(self._json.tokens, self._matcher, words, repeats)
                words = others if others.any() else words
        self._allowed = words | self._end if accepting else words
        return self._allowed

    def accept(self, token_id: int) -> None:
        """The next token of the text.

        Raises:
            RequestError: it is not allowed.
            GrammarError: the grammar is too complex.
        """
        allowed, self._allowed = self._allowed, None
        if token_id in self._end_token_ids and (self.ended or self._matcher.is_accepting()):
            self.ended = True
            return
        if self.ended or not self._matcher.consume_token(token_id):
            problem = problem_of(self._matcher) or f"token {token_id} after the end"
            if allowed is not None and allowed[token_id // 32] >> token_id % 32 & 1:
                raise GrammarError("the grammar is too complex", got=problem, fix="simplify it: fewer repetitions")
            raise RequestError(
                "the grammar does not allow the token that was drawn",
                got=problem,
                fix="see whether the weights are good: logits that are no numbers let any token be drawn",
            )
        if self._json is not None:
            self._json.add(token_id)
        self.ended = self._matcher.is_stopped()


def other_names(
    tokens: JsonTokens,
    matcher: LLMatcher,
    words: UInt32[np.ndarray, "words"],
    repeats: list[bytes],
    *,
    some: bool = False,
) -> UInt32[np.ndarray, "words"]:
    """The tokens of `words` behind which a name can become another than those that its object has already.

    Args:
        matcher: of the text before these tokens.
        repeats: what would complete that text to a name that its object has, see `JsonText`.
        some: some of them suffice.
    """
    for rest in repeats:
        words = words & tokens.without(rest)
    parts = sorted({rest[:end] for rest in repeats for end in range(1, len(rest))}, key=len)
    begun = [(part, i) for part in parts for i in tokens.ids_of.get(part, ()) if words[i // 32] >> i % 32 & 1]
    others = words.copy()
    for _, token_id in begun:
        others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if some:  # behind a short part comes what comes behind a longer one
        begun = [] if others.any() else {part[:1]: (part, token_id) for part, token_id in reversed(begun)}.values()
    for part, token_id in begun:
        after, left = matcher.deep_copy(), [rest[len(part) :] for rest in repeats if rest.startswith(part)]
        after.consume_token(token_id)
        if other_names(tokens, after, next_tokens(after, tokens.vocab_size), left, some=True).any():
            others[token_id // 32] |= np.uint32(1 << token_id % 32)
    return others


def next_tokens(matcher: LLMatcher, vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """The tokens that may come next, without the end of the text, as bits. Raises `GrammarError` if the matcher has failed."""
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: -(-vocab_size // 32)].copy()
    if vocab_size % 32:
        words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    if matcher.is_error():
        raise GrammarError(
            "the grammar cannot go on here",
            got=problem_of(matcher),
            fix="simplify it, and let it ask only for text that the model's vocabulary can write",
        )
    return words


def problem_of(matcher: LLMatcher) -> str:
    """The error message of llguidance, on one line, without its internal state; empty without an error."""
    return " ".join(matcher.get_error().split("<state>")[0].split())[:300]
