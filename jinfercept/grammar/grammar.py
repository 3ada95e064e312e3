"""Which tokens may come next so that a text matches a grammar: llguidance over one vocabulary.

A grammar is compiled once, in the thread that asks for it; every request walks a copy of its own, a token at a time. Knows no
requests, no tools and no device: a mask is words of bits, and the end of a text is whatever tokens the request says end it.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from functools import cache
from hashlib import sha256
from typing import Protocol, final

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from jinfercept.errors import GrammarError, RequestError
from jinfercept.grammar.limits import check_gbnf, check_limits, check_rules, num_compiled_bytes
from jinfercept.quota import Quota
from jinfercept.structured_outputs import JSON_SPACE
from jinfercept.tokenizer.tokenizer import Tokenizer

MAX_COMPILED = 256
"""Grammars that are kept."""
MAX_COMPILED_BYTES = 2**26
"""Of the grammars that are kept, of all tenants together."""

_STACK_BYTES = 2**28
"""Of the thread that compiles: llguidance follows rules and references by recursion, up to 300 bytes of stack a character of a
schema, and a stack that is too small ends the process. Memory is taken only for what is used."""
_LEXER_FUEL = 250_000
"""Work on regular expressions before the first token, in llguidance's unit: half a second, of its own limit's two."""
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Ends every grammar in Lark. Text that a grammar forces is not looked for: it would be tokenised anew, all of it, at every
token, and in `start: A A` with `A: /b+/` it has no end."""
_starting = threading.Lock()


class GrammarSource(Protocol):
    """What can be compiled; `StructuredOutputsParams` are one."""

    @property
    def source(self) -> tuple[str, str]:
        """The kind of grammar, as llguidance calls it or one of `structured_outputs.KINDS`, and its text."""
        ...


@final
class Grammars:
    """Compiles what requests ask for; from any thread.

    Args:
        tokenizer: the vocabulary.
        vocab_size: tokens of the model's output layer, `V`; those that the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size, self._tenant = vocab_size, ""
        self._vocabulary = cache(lambda: _vocabulary(tokenizer, vocab_size))
        self._compiled: dict[str, TokenGrammar] = {}
        self._holders: dict[str, tuple[str, int]] = {}  # tenants and bytes
        self._quota = Quota(MAX_COMPILED, MAX_COMPILED_BYTES)
        self._lock = threading.Lock()

    def of(self, tenant: str) -> "Grammars":
        """The same vocabulary for a tenant: what it compiles is found by no other one, whom its time could tell of it."""
        mine = copy(self)
        mine._tenant = tenant
        return mine

    @property
    def num_compiled_bytes(self) -> int:
        """Bytes of the grammars that are kept, as `grammar_limits` estimates them."""
        with self._lock:
            return sum(num_bytes for _, num_bytes in self._holders.values())

    def compile(self, asked: GrammarSource) -> "TokenGrammar":
        """The grammar that is asked for; compiled only if it is not among the tenant's last ones.

        Raises:
            RequestError: it is too long or not valid, repeats something too often, says something that cannot be enforced, or
                matches no text that the vocabulary can write.
        """
        kind, text = asked.source
        check_limits(kind, text)
        name = sha256(json.dumps([self._tenant, kind, text]).encode()).hexdigest()
        with self._lock:
            vocabulary, known = self._vocabulary(), self._compiled.get(name)
        grammar = known or TokenGrammar(
            _on_a_large_stack(lambda: _matcher(vocabulary, self._vocab_size, kind, text)), self._vocab_size
        )
        with self._lock:
            self._keep(name, grammar, num_compiled_bytes(text))
        return grammar

    def _keep(self, name: str, grammar: "TokenGrammar", num_bytes: int) -> None:
        """Keep a grammar as the tenant's youngest, and drop what is too much."""
        if name not in self._compiled:
            self._compiled[name], self._holders[name] = grammar, (self._tenant, num_bytes)
            self._quota.charge(self._tenant, num_bytes)
        self._quota.add(self._tenant, name)
        while (victim := self._quota.victim(self._tenant)) is not None:
            del self._compiled[victim]
            tenant, given_back = self._holders.pop(victim)
            self._quota.remove(tenant, victim)
            self._quota.charge(tenant, -given_back)


@final
class TokenGrammar:
    """A compiled grammar.

    Args:
        matcher: at the beginning of a text.
        vocab_size: see `Grammars`.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def constrain(self, end_token_ids: frozenset[int]) -> "TokenConstraint":
        """A text that has not begun.

        Args:
            end_token_ids: tokens that end it where the grammar lets it end; empty for a text that ends only where nothing
                can follow.
        """
        return TokenConstraint(self._matcher.deep_copy(), self._vocab_size, end_token_ids)


@final
class TokenConstraint:
    """One text on its way through a grammar.

    Attributes:
        ended: nothing but the end can follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._end_token_ids = matcher, vocab_size, end_token_ids
        self._end = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in end_token_ids:
            if 0 <= token_id < vocab_size:
                self._end[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._allowed: UInt32[np.ndarray, "words"] | None = None  # here, if somebody asked
        self.ended = False

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next: bit `v % 32` of word `v // 32` for token `v`.

        Raises:
            GrammarError: no token can continue the text and it may not end here, or the grammar is too complex.
        """
        if self.ended:
            return self._end
        words = _words(self._matcher, self._vocab_size)
        self.ended = not words.any()
        self._allowed = words | self._end if self._matcher.is_accepting() else words
        return self._allowed

    def accept(self, token_id: int) -> None:
        """The next token of the text.

        Raises:
            RequestError: it is not allowed.
            GrammarError: the grammar is too complex to go on.
        """
        allowed, self._allowed = self._allowed, None
        if token_id in self._end_token_ids and (self.ended or self._matcher.is_accepting()):
            self.ended = True
            return
        if self.ended or not self._matcher.consume_token(token_id):
            problem = _problem(self._matcher) or f"token {token_id} after the end"
            if allowed is not None and allowed[token_id // 32] >> token_id % 32 & 1:
                raise GrammarError("the grammar is too complex", got=problem, fix="simplify it: fewer repetitions")
            raise RequestError(
                "the grammar does not allow the token that was drawn",
                got=problem,
                fix="see whether the weights are good: logits that are no numbers let any token be drawn",
            )
        self.ended = self._matcher.is_stopped()


class Vocabulary:
    """What llguidance asks of a tokenizer. A token behind the last one stands for the end of the text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        special = {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b"<end>"]
        self.special_token_ids = [*sorted(special), vocab_size]
        self.eos_token_id, self.bos_token_id = vocab_size, None
        self._id_of = {token: i for i, token in enumerate(self.tokens[:-1]) if token and i not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> list[int]:
        """The tokens that a grammar forces next; those of the text's very bytes, or masks would be wrong.

        SentencePiece-like vocabularies put a space before a text, and others normalise it: then behind a character that merges
        with nothing, or the longest tokens that fit.
        """
        for before in ("", "\x02"):
            skipped = len(self._tokenizer.encode(before, plain=True))
            token_ids = self._tokenizer.encode(before + text, plain=True)[skipped:]
            if b"".join(map(self._tokenizer.token_bytes, token_ids)) == text.encode():
                return token_ids
        return self._longest_first(text.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids = []
        while text:
            found = (length for length in range(self._longest, 0, -1) if text[:length] in self._id_of)
            length = next(found, None)
            if length is None:  # the vocabulary cannot write it: what comes before
                break
            token_ids.append(self._id_of[text[:length]])
            text = text[length:]
        return token_ids


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer, vocab_size)), n_vocab=vocab_size + 1)


def _matcher(vocabulary: LLTokenizer, vocab_size: int, kind: str, text: str) -> LLMatcher:
    """Compiles a grammar and takes its first mask, which finds what is too complex or cannot be written."""
    try:
        source = _source(kind, text)
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_problem(matcher))
        if not _words(matcher, vocab_size).any():
            raise ValueError("it matches nothing but the empty text")
    except ValueError as error:  # RequestError is one
        problem = error.got if isinstance(error, RequestError) else error
        raise RequestError(
            f"structured_outputs.{kind} cannot be enforced",
            got=f"{text[:80]}: {problem}",
            fix="see StructuredOutputsParams for what each of them takes",
        ) from error
    return matcher


def _source(kind: str, text: str) -> str:
    """A grammar as llguidance reads it. Raises `ValueError`."""
    if kind == "json":
        schema = LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
        )
        whole = {"name": "whole", "lark_grammar": f"start: @json_schema{_NO_FORCING}"}
        return json.dumps({"grammars": [whole, *json.loads(schema)["grammars"]]})
    if kind == "choice":  # one lexeme: a rule of thousands of texts has too many items
        lark = f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))}"
    elif kind == "regex":
        lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    else:
        lark = _lark(text) if kind == "grammar" else text
    return LLMatcher.grammar_from_lark(lark + _NO_FORCING)


def _lark(text: str) -> str:
    """A grammar in Lark or GBNF as Lark."""
    check_gbnf(text)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # it raises plain exceptions
        raise ValueError(f"neither Lark nor GBNF: {error}") from error
    check_rules(lark)
    return lark


def _on_a_large_stack[T](work: Callable[[], T]) -> T:
    """What the work returns or raises, done in a thread of its own."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # a panic of llguidance
            done.set_exception(RequestError("the grammar cannot be compiled", got=f"{error}"[:300], fix="simplify it"))

    with _starting:  # the size of stacks is the process's
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="jinfercept-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def _words(matcher: LLMatcher, vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """The tokens that may come next, without the end of the text. Raises `GrammarError` if nothing can."""
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: -(-vocab_size // 32)].copy()
    if vocab_size % 32:
        words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    if matcher.is_error():
        raise GrammarError(
            "the grammar cannot go on here",
            got=_problem(matcher),
            fix="simplify it, and let it ask only for text that the model's vocabulary can write",
        )
    return words


def _problem(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, on one line, without its internal state; empty if nothing is."""
    return " ".join(matcher.get_error().split("<state>")[0].split())[:300]
