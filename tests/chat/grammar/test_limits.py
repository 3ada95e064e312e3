"""Limits on grammars: what would take long, much memory or the process is refused before it is compiled."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jinfercept.chat.grammar.grammar import (
    MAX_CHARS,
    MAX_COMPILED_BYTES,
    MAX_GBNF_CHARS,
    MAX_LIST_CHARS,
    MAX_RULES,
    Grammars,
    Vocabulary,
)
from jinfercept.errors import RequestError
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.sample_tokenizers import END, VOCAB, byte_level, ids

DEEP = """
from tests.support.sample_tokenizers import VOCAB, byte_level
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.structured_outputs import StructuredOutputsParams
chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(700)}
schema = {"$ref": "#/$defs/a0", "$defs": chain | {"a700": {"type": "string"}}}
Grammars(byte_level(), VOCAB).compile(StructuredOutputsParams(json=schema)).constrain(frozenset({1})).allowed()
"""


def test_a_deep_chain_of_references_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", DEEP], cwd=Path(__file__).parents[3], check=False, timeout=150)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "before", ["", '"x" ', '"x" %lark {\n%llguidance {"no_forcing": false}\nstart: B B\nB: /c+/\n}\n | ']
)
def test_a_grammar_that_can_never_end_is_not_followed_without_end(byte_grammars: Grammars, before: str) -> None:
    grammar = f'%llguidance {{"no_forcing": false}}\nstart: {before}A A\nA: /b+/\n'

    def compile() -> None:
        byte_grammars.compile(StructuredOutputsParams(grammar=grammar)).constrain(frozenset({END})).allowed()

    thread = threading.Thread(target=compile, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "source",
    [
        StructuredOutputsParams(json={"const": "b" * 20_000}),
        StructuredOutputsParams(regex="b{10000}c"),
        StructuredOutputsParams(choice=["b" * 20_000]),
        StructuredOutputsParams(grammar=f'start: "{"b" * 20_000}"'),
        f'start: "{"b" * 20_000}"',
    ],
    ids=["json", "regex", "choice", "grammar", "calls"],
)
def test_a_long_text_that_is_forced_is_not_tokenised_again_at_every_token(
    source: StructuredOutputsParams | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised = list[int]()
    call = Vocabulary.__call__

    def counted(self: Vocabulary, text: str) -> list[int]:
        tokenised.append(len(text))
        return call(self, text)

    monkeypatch.setattr(Vocabulary, "__call__", counted)
    constraint = Grammars(byte_level(), VOCAB).compile(source).constrain(frozenset())
    for _ in range(20):
        allowed = ids(constraint.allowed())
        constraint.accept(allowed[0])
    assert sum(tokenised) < 1000


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        ({"regex": "a" * (MAX_CHARS + 1)}, "too long"),
        ({"json": {"const": "a" * MAX_CHARS}}, "too long"),
        ({"choice": ["a" * (MAX_LIST_CHARS + 1)]}, "too long"),
        ({"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(MAX_RULES)) + 'a300: "x"'}, "rules"),
        ({"grammar": "root ::= a\n" + "a ::= b\n" * (MAX_GBNF_CHARS // 8)}, "in Lark"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "neither Lark nor GBNF"),
    ],
)
def test_grammars_that_would_take_long_are_refused(byte_grammars: Grammars, constraint: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        byte_grammars.compile(StructuredOutputsParams(**constraint))


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a|b){2,1000000000}"},
        {"regex": "((a|b){1,1000000000}c){1,1000000000}"},
        {"regex": f"(a{{1,{10**12}}})"},
        {"grammar": "start: A\nA: /a{2,1000000000}/"},
        {"grammar": 'start: ("a"|"b"){2,1000000000}'},
        {"grammar": 'start: %json {"type": "string", "maxLength": 1000000000}'},
        {"json": {"type": "array", "items": {"type": "string", "minLength": 10**9}, "minItems": 10**9}},
        {"json": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 10**9}},
    ],
)
def test_large_repetitions_are_compiled_or_refused_and_cost_nothing_per_token(
    byte_grammars: Grammars, constraint: Any
) -> None:
    started = time.process_time()
    with suppress(RequestError):
        state = byte_grammars.compile(StructuredOutputsParams(**constraint)).constrain(frozenset())
        for _ in range(100):
            state.accept(ids(state.allowed())[-1])
    assert time.process_time() - started < 2


def test_compiled_grammars_have_a_budget_of_bytes_that_one_tenant_cannot_take_from_another() -> None:
    grammars = Grammars(byte_level(), VOCAB)
    small = StructuredOutputsParams(choice=["yes"])
    kept = grammars.of("other").compile(small)
    for number in range(MAX_COMPILED_BYTES // (200 * MAX_LIST_CHARS) + 3):
        long = StructuredOutputsParams(choice=[f"{number}" + "q" * (MAX_LIST_CHARS - 10)])
        grammars.of("greedy").compile(long)
        assert grammars.num_compiled_bytes <= MAX_COMPILED_BYTES
    assert grammars.of("other").compile(small) is kept


def test_a_grammar_that_is_refused_is_not_kept() -> None:
    grammars = Grammars(byte_level(), VOCAB)
    with pytest.raises(RequestError):
        grammars.compile(StructuredOutputsParams(regex="(?=a)b"))
    assert grammars.num_compiled_bytes == 0


def test_what_one_tenant_compiled_is_compiled_again_for_another() -> None:
    grammars = Grammars(byte_level(), VOCAB)
    params = StructuredOutputsParams(choice=["yes"])
    first, second = grammars.of("one"), grammars.of("other")
    assert first.compile(params) is grammars.of("one").compile(params)
    assert first.compile(params) is not second.compile(params)
    assert grammars.compile(params) is not first.compile(params)


def test_schemas_whose_automata_grow_without_bound_are_refused_before_they_are_compiled(
    byte_grammars: Grammars,
) -> None:
    chain: dict[str, Any] = {f"a{i}": {"pattern": f".*a.{{{i}}}b.*", "$ref": f"#/$defs/a{i + 1}"} for i in range(20)}
    doubled: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(200)}
    for schema, message in (
        ({"type": "integer", "multipleOf": 99_999_999}, "multipleOf too large"),
        ({"type": "integer", "multipleOf": -99_999_999}, "multipleOf too large"),
        ({"type": "integer", "multipleOf": 10**400}, "multipleOf too large"),
        ({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf too large"),
        ({"type": "string", "allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}, "too many patterns"),
        ({"$ref": "#/$defs/a0", "$defs": chain | {"a20": {"type": "string"}}}, "too many patterns"),
        ({"$ref": "#/$defs/a0", "$defs": doubled | {"a200": {"pattern": "a+", "type": "string"}}}, "too many patterns"),
    ):
        with pytest.raises(RequestError, match=message):
            byte_grammars.compile(StructuredOutputsParams(json=schema))
        with pytest.raises(RequestError, match=message):
            byte_grammars.compile(f"start: %json {json.dumps(schema)}")
    lark = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))
    with pytest.raises(RequestError, match="too many patterns"):
        byte_grammars.compile(StructuredOutputsParams(grammar=lark))
    for taken in ({"multipleOf": 0.01, "type": "number"}, {"multipleOf": 1000, "type": "integer"}):
        byte_grammars.compile(StructuredOutputsParams(json=taken))
    several = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "[a-c]+"} for i in range(20)}}
    byte_grammars.compile(StructuredOutputsParams(json=several))
