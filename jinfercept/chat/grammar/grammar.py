"""`Grammars`: compiles grammars over one vocabulary with llguidance, and keeps the most recent ones.

A grammar is compiled once, in the calling thread. Every request has its own state of it. Characters, rules, multiples and
patterns of a client's grammar have limits. Repetitions need none: llguidance counts them, and its own limits end a grammar that
becomes too complex.
"""

import json
import math
import re
import threading
from collections.abc import Iterator
from copy import copy
from fractions import Fraction
from functools import cache
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Any, final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from jinfercept.chat.grammar.constraint import (
    LEXER_FUEL,
    ForbiddenText,
    JsonText,
    JsonTokens,
    TokenGrammar,
    next_tokens,
    on_large_stack,
    problem_of,
)
from jinfercept.chat.grammar.schemas import source_of
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError
from jinfercept.sched.tenants import ExpiringEntries, Quota
from jinfercept.structured_outputs import JSON_SPACE, StructuredOutputsParams, at_reference

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


MAX_CHARS = 2**15
"""Characters of a grammar or of a JSON schema."""
MAX_LIST_CHARS = 2**17
"""Characters of a list of choices, and of a grammar for the calls of many tools."""
MAX_RULES = 300
"""Rules of a Lark grammar: llguidance takes two seconds to report a mistake behind so many, ten behind a thousand."""
MAX_GBNF_CHARS = 2**14
"""Characters of a grammar in GBNF, whose translation to Lark takes quadratic time."""
MAX_MULTIPLE = 10_000
"""Bound of the least common multiple of all `multipleOf` of a schema, at their finest decimal place: compiling takes time and
memory in proportion (0.6 s and 90 MiB at 99,999)."""
MAX_INTERSECTIONS = 8
"""Patterns that one text may have to match at a time: compiling takes 1.8 times as long for each (6 s for 14 of them)."""

_BYTES = 2**17
"""Least bytes of a compiled grammar: measured 0.1 MB."""
_BYTES_A_CHAR = 200
"""Bytes of a compiled grammar per character: measured 17 for a long text, 30 for choices, 60 for regular expressions, 190 for
many properties."""
_RULE = re.compile(r"^[ \t]*[!?]?\w[^\n]*:", re.MULTILINE)
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?\d[\d.]*(?:[eE][-+]?\d+)?)')
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_limits(kind: str, text: str) -> None:
    """Raise `RequestError` for a grammar that is too long, or takes too long to compile.

    Args:
        kind: as llguidance calls it, or one of `structured_outputs.KINDS`.
    """
    most = MAX_LIST_CHARS if kind in ("choice", "lark") else MAX_CHARS
    if len(text) > most:
        raise RequestError(
            f"structured_outputs.{kind} is too long", got=f"{len(text)} characters", fix=f"at most {most}"
        )
    try:
        text.encode()
        if kind == "json":
            json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        got = ascii(text[:80])
        raise RequestError(f"structured_outputs.{kind} has half a character", got=got, fix="send whole ones") from None
    if kind == "json":
        _check_whole_schema(json.loads(text))
    elif kind in ("grammar", "lark"):
        _check_intersections(kind, _LITERAL.sub("", text).count("&"))
        for schema in _embedded_schemas(text):
            _check_whole_schema(schema)


def check_gbnf(text: str) -> None:
    """Raise `ValueError` for a grammar in GBNF that is too long."""
    if "::=" in text and len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"GBNF of more than {MAX_GBNF_CHARS} characters; write it in Lark")


def check_rules(lark: str) -> None:
    """Raise `ValueError` for too many rules."""
    if len(_RULE.findall(lark)) > MAX_RULES:
        raise ValueError(f"more than {MAX_RULES} rules")


def num_compiled_bytes(text: str) -> int:
    """Estimate the bytes of a compiled grammar from its text, rather too many."""
    return _BYTES + _BYTES_A_CHAR * len(text)


def _embedded_schemas(lark: str) -> Iterator[Any]:
    for directive in re.finditer(r"%json\s*", lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, directive.end())[0]
        except ValueError:  # text that is no JSON is left to the compiler
            continue


def _check_whole_schema(schema: Any) -> None:
    _check_multiples(schema)
    _check_intersections("json", _num_patterns(schema))


def _check_multiples(schema: Any) -> None:
    texts = _MULTIPLE.findall(json.dumps(schema))
    numbers = [abs(Fraction(text)) for text in texts]
    finest = math.lcm(*(number.denominator for number in numbers))
    common = math.lcm(*(int(number * finest) for number in numbers if number > 0))
    if common > MAX_MULTIPLE:
        raise RequestError(
            "structured_outputs.json: multipleOf too large",
            got=", ".join(texts)[:80],
            fix=f"numbers whose least common multiple is at most {MAX_MULTIPLE} of their finest decimal place",
        )


def _check_intersections(where: str, number: int) -> None:
    if number > MAX_INTERSECTIONS:
        raise RequestError(
            f"structured_outputs.{where} combines too many patterns", got=number, fix=f"at most {MAX_INTERSECTIONS}"
        )


def _num_patterns(schema: Any) -> int:
    # an upper estimate of the patterns that one text has to match at the same time
    counts: dict[int, int] = {}  # by the identity of a part, once its own parts are there
    opened, stack = set[int](), [schema]
    while stack:
        part = stack[-1]
        together, apart = _parts(part, schema)
        if id(part) not in opened:  # its parts first; those that are open are around it, in a circle of references
            opened.add(id(part))
            stack += [inner for inner in (*together, *apart) if id(inner) not in opened]
            continue
        stack.pop()
        own = isinstance(part, dict) and ("pattern" in part or "format" in part)
        added = sum(counts.get(id(inner), 0) for inner in together)
        counts.setdefault(id(part), own + added + max((counts.get(id(inner), 0) for inner in apart), default=0))
    return counts[id(schema)]


def _parts(part: Any, schema: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(part, list):
        return [], [inner for inner in part if isinstance(inner, dict | list)]
    if not isinstance(part, dict):
        return [], []
    # a text matches all parts in `together`, but only one of those in `apart`
    together, apart = [], []
    for key, value in part.items():
        if key == "allOf" and isinstance(value, list):
            together += value
        elif key == "$ref" and isinstance(value, str):
            together.append(at_reference(value, schema))
        elif key in ("anyOf", "oneOf"):
            together.append(value)
        elif key in _NAMED and isinstance(value, dict):
            apart += value.values()
        elif key not in _VALUES:
            apart.append(value)
    return [inner for inner in together if isinstance(inner, dict | list)], [
        inner for inner in apart if isinstance(inner, dict | list)
    ]
