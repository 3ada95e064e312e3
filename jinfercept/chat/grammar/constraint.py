"""A compiled grammar, and the state of a text within it: which tokens may come next. Masks are words of bits.

`JsonText` limits what llguidance leaves unlimited in JSON: digits of numbers, and names that an object has already. A small
model at temperature 0 repeats a digit or a name until `max_tokens`. Numbers and strings differ in the tokens that the grammar
allows next, so numbers are also recognised within calls, of which only the arguments are JSON. `ForbiddenText` keeps one
string out of a text, whichever tokens would write it, in addition to a grammar if there is one.
"""

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cache, cached_property, lru_cache
from typing import final

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import GrammarError, RequestError
from jinfercept.hooks import Constraint, Grammar

_STACK_BYTES = 2**28
"""Stack of the thread that compiles: llguidance follows rules and references by recursion, up to 300 bytes of stack a
character of a schema, and a stack that is too small ends the process. Only used pages take memory."""
LEXER_FUEL = 250_000
"""Work on regular expressions before the first token, in llguidance's unit: half a second; its own limit takes two."""
_starting = threading.Lock()
_MOST_DIGITS = {b"": 19, b".": 17, b"e-": 3, b"e": 2}
"""Digits in a row: of a whole number or before the point, of a fraction, and of an exponent. A 64-bit integer has 19; 17 tell
every double from its neighbours, and an exponent of three digits could make it infinite."""
_MOST_ZEROS = 14
"""Zeros in a fraction behind other digits, where more digits have to follow: later ones would be lost in a double."""
_TAIL_BYTES = 48
_RUN = re.compile(rb"(\.|[eE]-|[eE]?)[-+]?([0-9]+)\Z")
_NO_NUMBER = {letter.encode() for letter in 'abcdfghijklmnopqrstuvwxyz"'}
"""Tokens that may follow digits in a string, and never in a number."""


@final
class JsonTokens:
    """The masks by which `JsonText` limits a text. All grammars over one vocabulary share them."""

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int) -> None:
        # the bytes that a token adds to the text; `vocab_size` as in `Grammars`
        self.token_bytes, self.vocab_size = token_bytes, vocab_size
        self.without = lru_cache(maxsize=256)(self._without)

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted(zip(self._tokens, range(self.vocab_size), strict=True))

    def _without(self, start: bytes) -> UInt32[np.ndarray, "words"]:
        others = np.ones(self.vocab_size, np.bool_)
        for written, token_id in self._sorted[bisect_left(self._sorted, (start, -1)) :]:
            if not written.startswith(start):
                break
            others[token_id] = False
        return _mask(others)

    @cached_property
    def no_number(self) -> UInt32[np.ndarray, "words"]:
        return _mask([token in _NO_NUMBER for token in self._tokens])

    @cached_property
    def short(self) -> list[UInt32[np.ndarray, "words"]]:
        """Masks of the tokens that begin with at most `index` digits. The last mask has all tokens."""
        digits = np.array([len(token) - len(token.lstrip(b"0123456789")) for token in self._tokens])
        return [_mask(digits <= most) for most in range(int(digits.max()) + 1)]


@final
class JsonText:
    """One text that is JSON (`whole`), or contains JSON."""

    def __init__(self, tokens: JsonTokens, *, whole: bool) -> None:
        self._tokens, self._whole = tokens, whole
        self._tail = b""  # more bytes than a number has
        self._open: list[set[bytes] | None] = []  # names of each open object; None for a list
        self._string: bytes | None = None  # of the open string
        # `has_limits`: `limited` may leave tokens out
        self._escaped = self._is_name = self.has_limits = False  # the next character; the open or next string

    def copy(self) -> "JsonText":
        copied = copy(self)
        copied._open = [None if names is None else {*names} for names in self._open]
        return copied

    def add(self, token_id: int) -> None:
        """Add the next token of the text."""
        written = self._tokens.token_bytes(token_id)
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
        """The endings that would make the open or next name equal to a name of the same object; each ends with its quote."""
        if not self._is_name or not self._open or not self._open[-1]:
            return []
        opening, written = (b'"', b"") if self._string is None else (b"", self._string)
        return [opening + name[len(written) :] + b'"' for name in self._open[-1] if name.startswith(written)]

    def limited(self, words: UInt32[np.ndarray, "words"], may_end: bool) -> UInt32[np.ndarray, "words"]:
        """Leave out further digits and repeated names, unless nothing else may follow.

        `words` are the tokens that the grammar allows, with bits as in `TokenConstraint.allowed`.
        """
        tokens = self._tokens
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


@final
class TokenGrammar:
    """A compiled grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, json: JsonText | None) -> None:
        # matcher and JSON have the state of an empty text; no JSON: texts contain none
        self._matcher, self._vocab_size, self._json = matcher, vocab_size, json

    def constrain(self, end_token_ids: frozenset[int]) -> "TokenConstraint":
        json = self._json and self._json.copy()
        return TokenConstraint(self._matcher.deep_copy(), self._vocab_size, end_token_ids, json)


@final
class TokenConstraint:
    """The state of one text within a grammar."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, end_token_ids: frozenset[int], json: JsonText | None
    ) -> None:
        self._matcher, self._vocab_size, self._end_token_ids, self._json = matcher, vocab_size, end_token_ids, json
        self._end = words_of(end_token_ids, vocab_size)
        self._allowed: UInt32[np.ndarray, "words"] | None = None  # of the next token, once computed
        self.ended = False

    def copy(self) -> "TokenConstraint":
        """Copy the state. Tokens that the copy accepts do not change the original."""
        json = self._json and self._json.copy()
        copied = TokenConstraint(self._matcher.deep_copy(), self._vocab_size, self._end_token_ids, json)
        copied.ended = self.ended
        return copied

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """Raises `GrammarError` if no token can continue the text and it may not end here, or the grammar is too complex."""
        if self.ended:
            return self._end
        words = next_tokens(self._matcher, self._vocab_size)
        self.ended = not words.any()
        accepting = self._matcher.is_accepting()
        if self._json is not None and self._json.has_limits:
            words = self._json.limited(words, may_end=accepting and bool(self._end.any()))
        self._allowed = words | self._end if accepting else words
        return self._allowed

    def accept(self, token_id: int) -> None:
        """Raises `RequestError` if the token is not allowed, and `GrammarError` if the grammar is too complex."""
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


def words_of(token_ids: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """Set the bits of tokens, ignoring those outside the vocabulary."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def next_tokens(matcher: LLMatcher, vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """Return the tokens that may come next, without the end of the text. Raises `GrammarError` if the matcher has failed."""
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
    """Return llguidance's error message on one line, without its internal state; "" if there is no error."""
    return " ".join(matcher.get_error().split("<state>")[0].split())[:300]


def on_large_stack[T](work: Callable[[], T]) -> T:
    """Run `work` in a thread with a large stack; return or raise what it does."""
    task = Future[T]()

    def run() -> None:
        try:
            task.set_result(work())
        except Exception as error:
            task.set_exception(error)
        except BaseException as error:  # a panic of llguidance
            task.set_exception(RequestError("the grammar cannot be compiled", got=f"{error}"[:300], fix="simplify it"))

    with _starting:  # the size of stacks is the process's
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="jinfercept-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return task.result()


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
