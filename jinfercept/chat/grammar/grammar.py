"""`Grammars`: compiles grammars over one vocabulary with llguidance, and keeps the most recent ones.

A grammar is compiled once, in the calling thread. Every request has its own state of it.
"""

import json
import threading
from copy import copy
from functools import cache
from hashlib import sha256
from math import inf
from time import monotonic
from typing import final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from jinfercept.chat.grammar.constraint import (
    LEXER_FUEL,
    JsonText,
    JsonTokens,
    TokenGrammar,
    next_tokens,
    on_large_stack,
    problem_of,
)
from jinfercept.chat.grammar.forbidden_text import ForbiddenText
from jinfercept.chat.grammar.limits import check_gbnf, check_limits, check_rules, num_compiled_bytes
from jinfercept.chat.grammar.schemas import source_of
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError
from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.structured_outputs import JSON_SPACE, StructuredOutputsParams

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Ends every grammar in Lark: llguidance does not search for forced text, which it would tokenise anew at every token, and
which in `start: A A` with `A: /b+/` has no end."""


class Vocabulary:
    """A tokenizer in llguidance's interface. One more token after the last one stands for the end of the text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b"<end>"]
        self.special_token_ids = [*sorted(special), vocab_size]
        self.eos_token_id, self.bos_token_id = vocab_size, None
        self._id_of = {token: i for i, token in enumerate(self.tokens[:-1]) if token and i not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> list[int]:
        """Encode a text greedily, by the longest tokens that fit. Masks need tokens with exactly the bytes of the text."""
        rest, token_ids = text.encode(), list[int]()
        while rest:
            lengths = (length for length in range(self._longest, 0, -1) if rest[:length] in self._id_of)
            if (length := next(lengths, None)) is None:  # the vocabulary cannot write the rest
                break
            token_ids.append(self._id_of[rest[:length]])
            rest = rest[length:]
        return token_ids


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer, vocab_size)), n_vocab=vocab_size + 1)


def compile_matcher(vocabulary: LLTokenizer, vocab_size: int, kind: str, text: str) -> LLMatcher:
    """Compile a grammar. Its first mask is computed, to find grammars that are too complex or cannot be written.

    Raises:
        RequestError: llguidance refuses the grammar, or it matches no text that the vocabulary can write.
    """
    return on_large_stack(lambda: _matcher(vocabulary, vocab_size, kind, text))


def _matcher(vocabulary: LLTokenizer, vocab_size: int, kind: str, text: str) -> LLMatcher:
    try:
        source = _source(kind, text)
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(problem_of(matcher))
        if not next_tokens(matcher, vocab_size).any():
            raise ValueError("it matches only the empty text")
    except ValueError as error:  # RequestError is one
        problem = error.got if isinstance(error, RequestError) else error
        raise RequestError(
            f"structured_outputs.{kind} cannot be enforced",
            got=f"{text[:80]}: {problem}",
            fix="see StructuredOutputsParams for what each of them takes",
        ) from error
    return matcher


def _source(kind: str, text: str) -> str:
    if kind == "json":
        schema = LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
        )
        whole = {"name": "whole", "lark_grammar": f"start: @json_schema{_NO_FORCING}"}
        return json.dumps({"grammars": [whole, *json.loads(schema)["grammars"]]})
    if kind == "choice":  # one lexeme: a rule of thousands of texts has too many items
        lark = f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))}"
    elif kind == "regex":
        lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    else:
        lark = _lark(text) if kind == "grammar" else text
    return LLMatcher.grammar_from_lark(lark + _NO_FORCING)


def _lark(text: str) -> str:
    check_gbnf(text)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # it raises plain exceptions
        raise ValueError(f"neither Lark nor GBNF: {error}") from error
    check_rules(lark)
    return lark


MAX_COMPILED = 256
"""Limit of the grammars that are kept."""
MAX_COMPILED_BYTES = 2**26
"""Limit of the bytes of the grammars that are kept, for all tenants together."""


@final
class Grammars:
    """Compiles the grammars of requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        # size of the model's output layer, `V`; tokens that the tokenizer does not have are never allowed
        self._vocab_size, self._tenant = vocab_size, ""
        self.forbidden = cache(lambda text: ForbiddenText(text, tokenizer, vocab_size))
        self._vocabulary = cache(lambda: make_vocabulary(tokenizer, vocab_size))
        self._tokens = JsonTokens(tokenizer.token_bytes, vocab_size)
        self._kept = ExpiringEntries[TokenGrammar](Quota(MAX_COMPILED, MAX_COMPILED_BYTES), inf, monotonic)
        self._lock = threading.Lock()

    def of(self, tenant: str) -> "Grammars":
        """Return the grammars of one tenant over the same vocabulary.

        No other tenant finds them: the time of a compilation would reveal them.
        """
        copied = copy(self)
        copied._tenant = tenant
        return copied

    @property
    def num_compiled_bytes(self) -> int:
        """Bytes of the kept grammars, as `limits.num_compiled_bytes` estimates them."""
        return self._kept.num_bytes

    def compile(self, grammar: StructuredOutputsParams | str) -> "TokenGrammar":
        """Compile a grammar, unless it is among the tenant's recent ones.

        Raises `RequestError` if the grammar is too long or invalid, repeats something too often, cannot be enforced, or matches
        no text that the vocabulary can write.

        Args:
            grammar: structured outputs, or the source of a Lark grammar.
        """
        kind, text = ("lark", grammar) if isinstance(grammar, str) else source_of(grammar)
        name = sha256(json.dumps([self._tenant, kind, text]).encode()).hexdigest()
        if (earlier := self._kept.use(name)) is not None:
            return earlier
        check_limits(kind, text)
        with self._lock:
            vocabulary = self._vocabulary()
        matcher = compile_matcher(vocabulary, self._vocab_size, kind, text)
        json_text = JsonText(self._tokens, whole=kind == "json")
        compiled = TokenGrammar(matcher, self._vocab_size, json_text if kind in ("json", "lark") else None)
        self._kept.put(self._tenant, name, compiled, num_compiled_bytes(text))
        return compiled
