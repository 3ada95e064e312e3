"""Grammars over several vocabularies: whatever is drawn of what they allow, the text is one of theirs."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jinfercept.chat.grammar.constraint import TokenConstraint
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.grammar.schemas import SchemaReduction
from jinfercept.chat.parsers.tool_call_format import Rules
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.sample_tokenizers import END, VOCAB, byte_level, closed_objects, ids, sentencepiece, smollm2

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", 'a "dog"', None, 7]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "size": {"type": "number", "minimum": -1, "maximum": 1.5},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "minItems": 1, "maxItems": 3},
        "tenant": {
            "type": "object",
            "properties": {"id": {"type": "boolean"}, "at": {"$ref": "#/$defs/place"}},
            "required": ["id"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "age", "tags", "tenant"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"const": "here"}, {"type": "null"}]}},
}
VOCABULARIES = pytest.mark.parametrize(
    ("tokenizer", "vocab_size"),
    [(byte_level, VOCAB), (smollm2, 49152), (smollm2, 49217), (sentencepiece, 264), (sentencepiece, 300)],
    ids=["bytes", "smollm2", "smollm2, padded", "sentencepiece", "sentencepiece, padded"],
)


def walk(constraint: TokenConstraint, tokenizer: Tokenizer, seed: int, end: frozenset[int], limit: int = 400) -> str:
    """A random text to its end, of which every step allows something, and nothing that is no text."""
    rng, drawn = np.random.default_rng(seed), list[int]()
    while not constraint.ended:
        allowed = ids(constraint.allowed())
        assert allowed
        assert not {*allowed} & (tokenizer.special_ids - end)
        assert all(tokenizer.token_bytes(token) for token in allowed)
        short = [token for token in allowed if tokenizer.token_text(token) in '"}],'] if len(drawn) > limit else []
        drawn.append(int(rng.choice([*({*allowed} & end), *short] or allowed)))
        constraint.accept(drawn[-1])
    return tokenizer.decode([token for token in drawn if token not in end])


@VOCABULARIES
def test_choices_patterns_and_grammars_are_matched_from_end_to_end(tokenizer: Any, vocab_size: int) -> None:
    grammars = Grammars(tokenizer(), vocab_size)
    choices = ["yes", "yes, please", 'a "b" \\ c\nd', "naïve 😀", "ab a abba"]
    for params, pattern in (
        (StructuredOutputsParams(choice=choices), "|".join(map(re.escape, choices))),
        (StructuredOutputsParams(regex=r"[0-9]{1,3}(\.[a-c]+)?"), r"[0-9]{1,3}(\.[a-c]+)?"),
        (StructuredOutputsParams(grammar='start: "ab"+ tail\ntail: /[0-9]/ | "(" tail ")"'), r"(ab)+(\(+)?[0-9]\)*"),
        (StructuredOutputsParams(grammar='root ::= "ab" root | "c"'), "(ab)*c"),
    ):
        for seed in range(5):
            end = frozenset(tokenizer().special_ids)
            assert re.fullmatch(pattern, walk(grammars.compile(params).constrain(end), tokenizer(), seed, end))


def test_any_object_is_a_json_object(byte_grammars: Grammars) -> None:
    grammar = byte_grammars.compile(StructuredOutputsParams(json_object=True))
    for seed in range(10):
        assert isinstance(json.loads(walk(grammar.constrain(frozenset()), byte_level(), seed, frozenset())), dict)


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 1000},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^a[bc]{0,3}$"},
            {"enum": [1, "a\n", [2], None]},
            {"const": {"x": "é"}},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda *some: {"anyOf": list(some)}, inner, inner),
        closed_objects(inner),
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_any_schema_that_is_taken_gives_valid_values(byte_grammars: Grammars, schema: dict, seed: int) -> None:
    grammar, end = byte_grammars.compile(StructuredOutputsParams(json=schema)), frozenset(byte_level().eos_token_ids)
    # A number ends only where something else may follow it: here an end token.
    Draft202012Validator(schema).validate(json.loads(walk(grammar.constrain(end), byte_level(), seed, end)))


def test_what_is_allowed_is_what_can_go_on(byte_grammars: Grammars) -> None:
    """Against every token of the vocabulary; the end tokens, two of them, exactly where the text may end."""
    end = frozenset(byte_level().eos_token_ids) | {5000}
    constraint = byte_grammars.compile(StructuredOutputsParams(regex="[abc]{2,4}")).constrain(end)
    text = ""
    for token in byte_level().encode("a") + byte_level().encode("bc") + byte_level().encode("a"):
        following = [i for i in range(VOCAB) if re.fullmatch("[abc]{1,4}", text + (byte_level().token_text(i) or " "))]
        ends = sorted(byte_level().eos_token_ids) if len(text) >= 2 else []
        assert ids(constraint.allowed()) == following + ends
        constraint.accept(token)
        text += byte_level().token_text(token)
    assert constraint.ended or ids(constraint.allowed()) == []


def test_a_token_that_is_not_allowed_is_refused(byte_grammars: Grammars) -> None:
    constraint = byte_grammars.compile(StructuredOutputsParams(choice=["yes"])).constrain(frozenset())
    constraint.allowed()
    with pytest.raises(RequestError, match=r"does not allow.*weights"):
        constraint.accept(byte_level().encode("n")[0])


def test_thousands_of_choices_are_one_choice(byte_grammars: Grammars) -> None:
    choices = [f'item "{number}"\n' for number in range(5000)] + ["item"]
    constraint = byte_grammars.compile(StructuredOutputsParams(choice=choices)).constrain(frozenset({END}))
    for token_id in byte_level().encode(choices[4321]):
        assert token_id in ids(constraint.allowed())
        constraint.accept(token_id)
    assert ids(constraint.allowed()) == [END]


def test_a_grammar_that_is_too_complex_is_not_blamed_on_the_weights(byte_grammars: Grammars) -> None:
    many = "|".join(f'x"{number}"x' for number in range(2500))  # of which 2000 may be open at a time
    grammar = f'start: A b\nA: "a"\nb: {many}\nx: "a"'
    constraint = byte_grammars.compile(StructuredOutputsParams(grammar=grammar)).constrain(frozenset())
    constraint.allowed()
    with pytest.raises(RequestError, match="too complex"):
        constraint.accept(byte_level().encode("a")[0])


def test_white_space_in_json_has_a_bound(byte_grammars: Grammars) -> None:
    constraint = byte_grammars.compile(StructuredOutputsParams(json=NESTED)).constrain(frozenset())
    blank, line = byte_level().encode(" ")[0], byte_level().encode("\n")[0]
    for token in [*byte_level().encode("{"), line, *[blank] * 20]:
        constraint.accept(token)
    assert not {blank, line} & {*ids(constraint.allowed())}


def greedy(constraint: TokenConstraint, wanted: str, limit: int = 2100) -> str:
    """The text of a model that writes the first of some characters that is allowed, for ever, and else the end."""
    end, written = byte_level().eos_token_ids, list[int]()
    chars = [byte_level().encode(char)[0] for char in wanted]
    while not constraint.ended:
        allowed = ids(constraint.allowed())
        token = next(token for token in (*chars, *end, *allowed) if token in allowed)
        constraint.accept(token)
        written += [token] if token not in end else []
        assert len(written) < limit, byte_level().decode(written)[:99]
    return byte_level().decode(written)


def test_no_number_is_infinite_in_an_answer_or_a_call(byte_grammars: Grammars) -> None:
    rules, number = Rules(), {"type": "number"}
    for grammar in (StructuredOutputsParams(json=number), rules.text(rules.json(number))):
        constraint = byte_grammars.compile(grammar).constrain(byte_level().eos_token_ids)
        assert math.isfinite(float(greedy(constraint, "e9")))


LONGEST: list[tuple[dict[str, Any], int]] = [
    ({"type": "integer"}, 20),
    ({"type": "integer", "minimum": 1}, 20),
    ({"type": "integer", "maximum": -1}, 20),
    ({"type": "integer", "multipleOf": 3}, 22),
    ({"type": "number"}, 44),
    ({"type": "number", "minimum": 0, "maximum": 1}, 20),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 20),
    ({"type": "number", "exclusiveMinimum": 0.5}, 40),
    ({"type": "number", "maximum": -0.25}, 40),
    ({"type": "number", "multipleOf": 0.5}, 40),
    ({"minimum": 0, "type": ["number", "null"]}, 40),
    ({"type": "string", "format": "time"}, 26),
    ({"type": "string", "format": "date-time"}, 37),
    ({"type": "string", "format": "duration"}, 66),
    ({"type": "string", "format": "email"}, 322),
    ({"type": "string", "format": "hostname"}, 255),
    ({"type": "string", "format": "uri"}, 2050),
    *(({"type": "string", "format": name}, 47) for name in ("date", "ipv4", "ipv6", "uuid")),
]


@pytest.mark.parametrize(
    ("schema", "most"), LONGEST, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_a_value_with_a_natural_bound_ends_however_a_model_goes_on(
    byte_grammars: Grammars, schema: dict[str, Any], most: int
) -> None:
    end = frozenset(byte_level().eos_token_ids)
    for wanted in ("9", ".0", "-.09", "1.e0", "a", "Z.5", "-1e"):
        whole = greedy(byte_grammars.compile(StructuredOutputsParams(json=schema)).constrain(end), wanted)
        call = f'start: "<" %json {json.dumps(SchemaReduction(True).reduce(schema))} ">"'
        in_call = greedy(byte_grammars.compile(call).constrain(end), wanted)
        for text in (whole, in_call[1:-1]):
            assert len(text) <= most
            Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, str(2**63 - 1)),
        ({"type": "number"}, f"-{2**63}.{'7' * 17}e-308"),
        ({"type": "string"}, f'"{"9" * 40}"'),
        ({"type": "string", "pattern": "^[0-9]{4,40}$"}, f'"{"9" * 40}"'),
        ({"type": "integer", "minimum": 10**17}, str(10**17)),
        ({"type": "string", "pattern": "^[0-9]{30}$"}, f'"{"0" * 30}"'),
        ({"type": "string", "format": "date-time"}, '"2025-02-28T12:00:00.123456789+01:00"'),
        ({"type": "string", "format": "email", "pattern": r"@example\.com$"}, '"a@example.com"'),
    ],
)
def test_long_digits_that_a_value_may_have_stay(byte_grammars: Grammars, schema: dict[str, Any], text: str) -> None:
    end = min(byte_level().eos_token_ids)
    constraint = byte_grammars.compile(StructuredOutputsParams(json=schema)).constrain(frozenset({end}))
    for token in (*byte_level().encode(text), end):
        assert token in ids(constraint.allowed())
        constraint.accept(token)


CLOSED = {"type": "object", "additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**CLOSED, "patternProperties": {"^a|b$": DIGIT}, "maxProperties": 3}, '{"a":1,"aa":1,"aaa":1}'),
        ({**CLOSED, "additionalProperties": DIGIT, "minProperties": 3, "maxProperties": 3}, '{"":1,"a":1,"aa":1}'),
        (
            {
                **CLOSED,
                "properties": {"b": CLOSED},
                "additionalProperties": DIGIT,
                "required": ["b"],
                "maxProperties": 3,
            },
            '{"b":{},"":1,"a":1}',
        ),
        ({**CLOSED, "properties": {"a": DIGIT, "b": DIGIT}, "minProperties": 1}, '{"a":1,"b":1}'),
    ],
)
def test_an_object_has_no_name_twice(byte_grammars: Grammars, schema: dict[str, Any], text: str) -> None:
    constraint = byte_grammars.compile(StructuredOutputsParams(json=schema)).constrain(frozenset({END}))
    assert greedy(constraint.copy(), '"a1,') == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured outputs take exactly one kind of constraint; got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"json": "{"}, "not JSON"),
        ({"json": '{"maximum": NaN}'}, "not JSON"),
        ({"json": {"minimum": float("inf")}}, "not JSON"),
        ({"json": {1: {2}}}, "not JSON"),
        ({"json": 7}, "JSON schema as text"),
        ({"json": "[1]"}, "Expecting object schema"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "nested too deeply"),
        ({"json": {"type": "what"}}, "Invalid type"),
        ({"json": {"type": "object", "not": {}}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
        ({"json": {**CLOSED, "patternProperties": {"^x[0-9]$": {}}, "minProperties": 4}}, "#/minProperties"),
        ({"json_object": "yes"}, "True, or leave it out"),
        ({"regex": "(("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "()"}, "it matches only the empty text"),
        ({"regex": ""}, "not empty"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": "yes"}, "list of texts"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "what?"}, "grammar"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_enforced_is_refused(byte_grammars: Grammars, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        byte_grammars.compile(StructuredOutputsParams(**fields))
    assert len(str(caught.value)) < 600


def test_text_that_the_vocabulary_cannot_write_is_refused_or_ends_in_an_error() -> None:
    grammars = Grammars(smollm2(), 49152)  # it has no token for U+0004
    with pytest.raises(RequestError, match="cannot be enforced"):
        grammars.compile(StructuredOutputsParams(choice=["\x04"]))
    constraint = grammars.compile(StructuredOutputsParams(choice=["a\x04"])).constrain(frozenset({2}))
    constraint.accept(smollm2().encode("a")[0])
    with pytest.raises(RequestError, match="vocabulary can write"):
        constraint.allowed()


def test_half_a_character_in_a_schema_is_a_mistake_that_can_be_written(byte_grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="half a character") as raised:
        byte_grammars.compile(StructuredOutputsParams(json='{"enum": ["\\ud800"]}'))
    str(raised.value).encode()
