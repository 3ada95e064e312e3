"""Declarations of tools that lack what OpenAI leaves optional, and templates that read it."""

from typing import Any

import pytest

from jinfercept.chat.template import ChatTemplate
from jinfercept.errors import RequestError
from tests.support.scripted_model import byte_tokenizer

FUNCTION = "{% for tool in tools %}{% set f = tool.function %}"
DESCRIBED = FUNCTION + "{{ f.name + ': ' + f.description + '\\n' }}{% endfor %}"
WITH_PARAMETERS = FUNCTION + "{{ f.parameters.properties.items() | list | length }}{% endfor %}"
AS_JSON = FUNCTION + "{{ f.parameters | tojson }}{% endfor %}"
DESCRIBED_PROPERTIES = (
    FUNCTION + "{% for name, p in f.parameters.properties.items() %}{{ name + ': ' + p.description }}"
    "{% if 'items' in p %}{{ ' of ' + p['items'].get('type', 'any') }}{% endif %} {% endfor %}{% endfor %}"
)
TYPED_PROPERTIES = (
    FUNCTION + "{% for name, p in f.parameters.properties.items() %}{{ name + ': ' + p.type }} {% endfor %}{% endfor %}"
)


def declared(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "price", **fields}}


def of(**properties: Any) -> dict[str, Any]:
    return declared(parameters={"type": "object", "properties": properties, "required": None})


def prompt(source: str, *tools: dict[str, Any]) -> str:
    template = ChatTemplate(byte_tokenizer(None), tools, source, {}, ())
    return template.render([{"role": "user", "content": "?"}]).strip()


@pytest.mark.parametrize(
    ("source", "tool", "written"),
    [
        (DESCRIBED, declared(), "price:"),
        (DESCRIBED, declared(description=None), "price:"),
        (WITH_PARAMETERS, declared(description="d"), "0"),
        (WITH_PARAMETERS, declared(parameters=None), "0"),
        (WITH_PARAMETERS, declared(parameters={}), "0"),
        (AS_JSON, declared(), '{"type": "object", "properties": {}}'),
        (DESCRIBED_PROPERTIES, of(a={"type": "string"}, b=True), "a:  b:"),
        (DESCRIBED_PROPERTIES, of(a={"items": True}, b={"description": 5}), "a:  of any b: 5"),
        (DESCRIBED_PROPERTIES, of(a={"items": [{"type": "number"}]}), "a:  of number"),
        (TYPED_PROPERTIES, of(a={"type": ["null", "string"]}, b={"type": "number"}), "a: string b: number"),
        (TYPED_PROPERTIES, of(a={"anyOf": [{"type": "null"}, {"type": "integer"}]}, b=True), "a: integer b: string"),
    ],
)
def test_a_template_that_reads_what_a_declaration_lacks_has_it_filled(
    source: str, tool: dict[str, Any], written: str
) -> None:
    assert prompt(source, tool) == written


def test_a_template_that_takes_declarations_as_they_are_has_them_so() -> None:
    tool = of(a={"type": ["string", "null"]}, b=True)
    as_given = '{"name": "price", "parameters": {"type": "object", "properties": '
    as_given += '{"a": {"type": ["string", "null"]}, "b": true}, "required": null}}'
    assert prompt(FUNCTION + "{{ f | tojson }}{% endfor %}", tool) == as_given


def test_tools_that_no_form_helps_are_named_in_the_error() -> None:
    never = "{% if tools %}{{ raise_exception('never') }}{% endif %}?"
    with pytest.raises(RequestError, match=r"does not take these tools; got .*never"):
        prompt(never, declared())
    with pytest.raises(RequestError, match="fails on a simple question"):
        prompt("{{ raise_exception('never') }}", declared())


def test_declarations_that_are_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError):
        prompt(DESCRIBED, of(a=schema))
