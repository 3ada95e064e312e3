"""The JSON-Schema-Test-Suite as an oracle: a schema is refused, or a text is allowed exactly if its value is valid.

The suite is that in the source package of `jsonschema`, which pip downloads into the folder of downloads.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jinfercept.chat.grammar.constraint import TokenGrammar
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.grammar.schemas import SchemaReduction
from jinfercept.chat.parsers.tool_call_format import Rules, arguments_schema
from jinfercept.errors import ConfigError, RequestError
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.tools.calls import CallFailed, check_of
from jinfercept.tools.tool_tables import Place
from tests.support.fetched_packages import source_package
from tests.support.sample_tokenizers import VOCAB, byte_level

VERSION = "4.25.1"
DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft2020-12": ""}
NUM_REFUSED = {"draft7": 75, "draft2020-12": 148}
"""Schemas that are answered 400."""
ONE_OF = {
    *("oneOf", "oneOf with base schema", "oneOf with boolean schemas, all true", "oneOf complex types"),
    *("oneOf with boolean schemas, more than one true", "oneOf with empty schema", "oneOf with required"),
    "oneOf with missing optional property",
}
"""A value may fit several options."""
ENFORCED_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"),
}
"""Draft 2020-12 takes formats for annotations."""
REFERENCES = {"ref overrides any sibling keywords", "$ref prevents a sibling $id from changing the base uri"}
"""In draft 7 nothing counts beside a `$ref`."""
DIFFERENCES = {
    "draft7": ONE_OF | REFERENCES,
    "draft2020-12": ONE_OF | {f"{name} format" for name in ENFORCED_FORMATS},
}
"""Those that docs/serving.md lists."""
WHOLE = re.compile(r'"\$ref": "[^#"]*#?"')
"""A reference to a whole schema."""
GRAMMARS = Grammars(byte_level(), VOCAB)


class Group(NamedTuple):
    """A schema, and values with whether they are valid."""

    description: str
    schema: Any
    values: list[tuple[Any, bool]]


@cache
def groups(draft: str) -> list[Group]:
    with tarfile.open(source_package("jsonschema", VERSION, "json_schema_suite")) as package:
        files = [member for member in package if Path(member.name).parts[1:-1] == ("json", "tests", draft)]
        contents = [package.extractfile(member) for member in files]
        return [
            Group(group["description"], group["schema"], [(test["data"], test["valid"]) for test in group["tests"]])
            for content in contents
            if content is not None
            for group in json.load(content)
        ]


def texts(value: Any) -> Iterator[str]:
    """A value in several forms: members in any order, with and without blanks, whole numbers without a fraction."""
    match value:
        case dict():
            for members in islice(permutations(value.items()), 24):
                for written in islice(product(*(islice(texts(member), 8) for _, member in members)), 64):
                    pairs = [
                        (json.dumps(key, ensure_ascii=False), text)
                        for (key, _), text in zip(members, written, strict=True)
                    ]
                    yield "{" + ",".join(f"{key}:{text}" for key, text in pairs) + "}"
                    yield "{" + ", ".join(f"{key}: {text}" for key, text in pairs) + "}"
        case list():
            for written in islice(product(*(islice(texts(item), 2) for item in value)), 16):
                yield "[" + ",".join(written) + "]"
                yield "[" + ", ".join(written) + "]"
        case float() if value.is_integer():
            yield from (json.dumps(value), str(int(value)))
        case _:
            yield json.dumps(value, ensure_ascii=False)


def allows(grammar: TokenGrammar, value: Any) -> bool:
    """Whether a grammar allows a value in one of its forms."""
    return any(allows_text(grammar, text) for text in texts(value))


def allows_text(grammar: TokenGrammar, text: str) -> bool:
    tokenizer = byte_level()
    end = min(tokenizer.eos_token_ids)
    constraint = grammar.constrain(tokenizer.eos_token_ids)
    for token_id in (*tokenizer.encode(text, plain=True), end):
        if not constraint.allowed()[token_id // 32] >> token_id % 32 & 1:
            return False
        constraint.accept(token_id)
    return True


def compiled(make: Any) -> TokenGrammar | None:
    """The grammar of what a function makes; None if it is refused."""
    try:
        return GRAMMARS.compile(make())
    except RequestError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_answer_is_valid_and_any_valid_answer_is_allowed(draft: str) -> None:
    differences: set[str] = set()
    num_refused = 0
    for group in groups(draft):
        grammar = compiled(lambda schema=group.schema: StructuredOutputsParams(json=schema))
        num_refused += grammar is None
        if grammar is not None and any(allows(grammar, value) != valid for value, valid in group.values):
            differences.add(group.description)
    assert differences == DIFFERENCES[draft]
    assert num_refused == NUM_REFUSED[draft]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_arguments_of_a_tool_are_valid_or_the_log_says_what_is_checked_later(draft: str) -> None:
    """A grammar of calls may allow less than the schema; the check of a call may not.

    Arguments are objects, so that schemas that refer to themselves as a whole are left out.
    """
    num_checked = 0
    for group in groups(draft):
        if not isinstance(group.schema, dict) or WHOLE.search(json.dumps(group.schema)):
            continue
        whole = {**({"$schema": DRAFTS[draft]} if DRAFTS[draft] else {}), **group.schema, "type": "object"}
        reduction, rules = SchemaReduction(checked_later=True), Rules()
        values = [(value, valid) for value, valid in group.values if isinstance(value, dict)]
        try:
            arguments = arguments_schema("f", reduction.reduce(group.schema))
            check = check_of(whole, Place(Path("tools.toml"), 1))
        except (RequestError, ConfigError):
            continue
        grammar = compiled(lambda arguments=arguments, rules=rules: rules.text(rules.json(arguments)))
        if grammar is None:
            continue
        for value, valid in values:
            num_checked += 1
            assert not allows(grammar, value) or valid or reduction.unenforced, group
            try:
                check(value)
            except CallFailed:
                assert not valid, group
            else:
                assert valid, group
    assert num_checked > 150
