"""What the renderer writes is what transformers writes, and what templates may not do."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError

from jinfercept.chat.tokenizer.chat_templates import render
from tests.support import chat_templates

TEMPLATES = {name: source for name, source in vars(chat_templates).items() if name.isupper() and "{%" in source}
CALL = {"id": "call-1", "type": "function", "function": {"name": "find", "arguments": {"what": "<é & ü>", "many": 2.5}}}
CONVERSATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "a question": [{"role": "user", "content": "Where?"}],
    "a call": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find it  \n"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"at": "home"}'},
        {"role": "tool", "tool_call_id": "call-2", "content": "nothing"},
    ],
    "reasoning": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning": "because"},
        {"role": "user", "content": "And?"},
    ],
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {}}}}}


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "QWEN_TEXT"])  # which fails on objects
def test_the_text_is_that_of_transformers(template: str) -> None:
    source = TEMPLATES[template]
    for name, messages in CONVERSATIONS.items():
        for tools in (None, [TOOL]):
            given = {"tools": tools, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
            expected = outcome(_by_transformers, source, messages, given)
            assert outcome(render, source, messages, given) == expected, name


def outcome(write: Callable[..., str], *given: Any) -> str:
    """The text, or the error that the template raises."""
    try:
        return write(*given)
    except TemplateError as error:
        return repr(error)


def _by_transformers(source: str, messages: Any, given: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=source, **given)  # pyright: ignore[reportAssignmentType]
    return text


FUNCTIONS = """
{%- set seen = namespace(count=0, self='x') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
  {%- set seen.count = seen.count + 1 -%}
  {%- generation -%}{{ message.content | trim }}{%- endgeneration -%}
  {%- if loop.index > 2 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{ seen.count }}{{ seen.self }}{{ dict(a='<b>', c=1) | tojson(indent=1) }}{{ dict.fromkeys(['k'], 0) | tojson }}
{{- dict(b=1, a='é') | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}
{%- for message in messages %}{{ message.thinking }}{{ message.reasoning_content }}{% endfor %}
{{- missing }}{{ missing is defined }}{{ 1.0 }}{{ none }}
"""


def test_what_templates_call_does_what_it_does_in_transformers() -> None:
    for messages in CONVERSATIONS.values():
        assert render(FUNCTIONS, messages, {}) == _by_transformers(FUNCTIONS, messages, {})


def test_a_template_knows_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}", [], {}) in {str(int(time.strftime("%Y")) + late) for late in (0, 1)}


def test_a_template_can_refuse() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [], {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (messages|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace({'_private': 1}) %}",
        "{% set n = namespace() %}{% set n._private = 1 %}",
        "{{ messages.append.__self__.__class__ }}",
        "{{ messages.sort() }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__.__base__}' | attr('format'))(1) }}{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{% include 'etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        text = render(source, messages, {})
    except (SecurityError, UndefinedError, OverflowError, TypeError):
        text = ""
    assert text == ""
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_template_changes_lists_of_its_own() -> None:
    """Some queue the ids of calls for the results."""
    source = "{% set ids = [] %}{% set _ = ids.append('a') %}{% set _ = ids.extend(['b']) %}{{ ids.pop(0) }}{{ ids }}"
    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        assert render(source + "{% set _ = messages.append(1) %}{{ messages | length }}", messages, {}) == "a['b']2"
    assert messages == [{"role": "user", "content": "Hi"}]


def test_what_map_makes_is_written_as_a_list() -> None:
    assert render("{{ tools | map(attribute='function') | tojson }}", [], {"tools": [{"function": 1}]}) == "[1]"


class Role(StrEnum):
    USER = "user"


def test_a_template_sees_plain_copies() -> None:
    messages = [MappingProxyType({"role": Role.USER, "content": ("a", "b")})]
    assert render("{{ messages }}{{ more }}", messages, {"more": MappingProxyType({})}) == (
        "[{'role': 'user', 'content': ['a', 'b']}]{}"
    )


@pytest.mark.parametrize("thing", [object(), b"bytes", print, {1, 2}])
def test_what_is_not_json_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError):
        render("", [{"role": "user", "content": thing}], {})
    with pytest.raises(TypeError):
        render("", [], {"tools": [thing]})


def test_messages_are_objects() -> None:
    message: Any = "Hi"
    with pytest.raises(TypeError, match="'Hi'"):
        render("", [message], {})


@pytest.mark.parametrize(
    "content",
    [
        "\ud83d\ude00",
        ("a", 1.5),
        {1: True, "b": None},
        MappingProxyType({"a": [MappingProxyType({})]}),
        [[StrEnum("E", "a").a]],
    ],
)
def test_a_template_sees_what_json_makes_of_a_value(content: Any) -> None:
    seen = render("{{ messages[0].content | tojson }}", [{"role": "user", "content": content}], {})
    assert json.loads(seen) == json.loads(json.dumps(content, default=dict))


def test_a_field_with_the_name_of_a_method_is_no_attribute() -> None:
    message = {"role": "user", "content": "Hi", "items": 3}
    assert render("{{ messages[0].items is callable }} {{ messages[0]['items'] }}", [message], {}) == "True 3"
    assert render("{{ messages[0].name is defined }}{{ messages[0].role }}", [message], {}) == "Falseuser"


def test_a_message_reads_the_same_in_every_rendering_whatever_the_template_does_to_its_lists() -> None:
    message = {"role": "user", "content": "Hi", "tags": ["a"]}
    plainly = "{{ messages[0].tags.append('b') }}{{ messages[0].tags }}"
    made_up = "{{ messages[0].tags['app' ~ 'end']('b') }}{{ messages[0].tags }}"
    shared = "{{ messages[0].tags }}"
    for source in (shared, plainly, made_up, plainly, made_up, shared):
        assert render(source, [message], {}) == render(source, [message | {"tags": ["a"]}], {})
