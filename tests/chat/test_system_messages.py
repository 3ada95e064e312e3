"""Conversations with several system messages, and templates that take one, none, or turns that alternate only."""

import re
import sys
from typing import Any

import pytest

from jinfercept.chat.messages import checked_message
from jinfercept.chat.system_messages import simpler_forms, with_leading_system
from jinfercept.chat.template import ChatTemplate
from jinfercept.errors import RequestError
from tests.support.scripted_model import byte_tokenizer

_SAYS = "{{ message.role + ': ' + message.content + '\\n' }}"
ANYWHERE = f"{{% for message in messages %}}{_SAYS}{{% endfor %}}"
DROPS = ANYWHERE.replace(_SAYS, f"{{% if loop.first or message.role != 'system' %}}{_SAYS}{{% endif %}}")
HOISTS = "".join(
    f"{{% for message in messages if message.role {test} 'system' %}}{_SAYS}{{% endfor %}}" for test in ("==", "!=")
)
RAISES = ANYWHERE.replace(
    _SAYS, f"{{% if message.role == 'system' and not loop.first %}}{{{{ raise_exception('no') }}}}{{% endif %}}{_SAYS}"
)
ALTERNATES = RAISES.replace(
    _SAYS,
    "{% if loop.previtem and loop.previtem.role == message.role %}{{ raise_exception('no') }}{% endif %}"
    f"{{% if message.tool_calls | length > 1 %}}{{{{ raise_exception('no') }}}}{{% endif %}}{_SAYS}",
)
NO_SYSTEM = ALTERNATES.replace("and not loop.first", "")


def turns(text: str, **fields: Any) -> list[dict[str, Any]]:
    """Messages, one a line, each behind its role."""
    lines = [line.partition(": ") for line in text.split("; ")]
    return [{"role": role, "content": content} | fields.get(role, {}) for role, _, content in lines]


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(byte_tokenizer(None), [], source, {}, ()).render([*map(checked_message, messages)]).strip()


CODEX = "system: a; system: b; user: c; user: d; assistant: e; system: f; user: g"


@pytest.mark.parametrize("source", [RAISES, DROPS, HOISTS])
def test_leading_messages_are_joined_and_later_ones_are_text_of_the_user(source: str) -> None:
    first = "system: a\n\nb\nuser: c\nuser: d\nassistant: e\nuser: <system>\nf\n</system>\n\ng"
    assert rendered(source, turns(CODEX)) == first


def test_a_template_that_takes_them_anywhere_has_them_where_they_stand() -> None:
    assert rendered(ANYWHERE, turns(CODEX)) == CODEX.replace("; ", "\n")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("system: a; user: b", "system: a\nuser: b"),
        ("user: b; system: a; assistant: c", "user: b\n\n<system>\na\n</system>\nassistant: c"),
        ("user: b; system: a; user: c", "user: b\n\n<system>\na\n</system>\n\nc"),
        ("user: b; system: ; user: c", "user: b\nuser: c"),
        ("user: b; system: a; system: c", "user: b\n\n<system>\na\n</system>\n\n<system>\nc\n</system>"),
        (
            "assistant: b; system: a; tool: c; tool: d; user: e",
            "assistant: b\ntool: c\ntool: d\nuser: <system>\na\n</system>\n\ne",
        ),
        (
            "assistant: b; tool: a; system: c; assistant: d",
            "assistant: b\ntool: a\nuser: <system>\nc\n</system>\nassistant: d",
        ),
    ],
)
def test_a_later_message_stands_in_the_turn_of_the_user(given: str, written: str) -> None:
    assert rendered(RAISES, turns(given)) == written


def test_the_texts_of_a_turn_are_joined_once_however_many_there_are() -> None:
    joined: list[str] = []
    given = turns("; ".join(["user: a", "system: b"] * 100))
    sys.setprofile(
        lambda _, event, called: joined.append("") if event == "c_call" and called.__name__ == "join" else None
    )
    try:
        [message] = with_leading_system(given)
        forms = list(simpler_forms(turns("; ".join(["user: a"] * 100))))
    finally:
        sys.setprofile(None)
    assert message["content"] == "\n\n".join(["a", "<system>\nb\n</system>"] * 100)
    assert [form[0]["content"] for form in forms] == ["\n\n".join("a" * 100)]
    assert len(joined) <= 5


def test_turns_that_have_to_alternate_are_joined_and_calls_parted() -> None:
    joined = "system: a\n\nb\nuser: c\n\nd\nassistant: e\nuser: <system>\nf\n</system>\n\ng"
    assert rendered(ALTERNATES, turns(CODEX)) == joined
    calls = [{"id": name, "function": {"name": "price", "arguments": {}}} for name in "12"]
    called = [*turns("user: a; user: b; assistant: c", assistant={"tool_calls": calls})]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "12"]
    assert rendered(ALTERNATES, [*called, *results]) == "user: a\n\nb\nassistant: c\ntool: 1\nassistant: \ntool: 2"


def test_text_behind_a_result_stands_in_it_if_the_template_takes_no_turn_of_the_user_there() -> None:
    pairs = "loop.previtem.role + message.role in ('tooluser', message.role * 2)"
    source = ALTERNATES.replace("loop.previtem.role == message.role", pairs)
    given = turns(
        "user: a; assistant: b; tool: c; user: d", assistant={"tool_calls": [{"function": {"name": "price"}}]}
    )
    assert rendered(source, given) == "user: a\nassistant: b\ntool: c\n\nd"


def test_a_template_without_a_system_role_has_its_text_in_the_turn_of_the_user() -> None:
    first = "user: <system>\na\n\nb\n</system>\n\nc\n\nd\nassistant: e\nuser: <system>\nf\n</system>\n\ng"
    assert rendered(NO_SYSTEM, turns(CODEX)) == first


CALLS = [{"id": name, "function": {"name": f"price-{name}", "arguments": {}}} for name in "12"]
RESULTS = [{"role": "tool", "tool_call_id": name, "content": name} for name in "12"]
THINKS = ANYWHERE.replace(_SAYS, f"{{{{ message.thinking }}}}{_SAYS}")


def test_text_beside_reasoning_and_a_call_is_part_of_the_reasoning_if_the_template_takes_no_more() -> None:
    both = (
        "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    )
    source = THINKS.replace("{{ message.thinking }}", f"{both}{{{{ message.thinking }}}}")
    fields = {"tool_calls": CALLS[:1], "reasoning_content": "c"}
    given = [*turns("user: a; assistant: b", assistant=fields), RESULTS[0]]
    assert rendered(source, given) == "user: a\nc\n\nbassistant: \ntool: 1"
    assert rendered(THINKS, given) == "user: a\ncassistant: b\ntool: 1"


def test_an_empty_turn_is_left_out_if_the_template_refuses_it() -> None:
    source = ALTERNATES.replace(
        _SAYS, f"{{% if not message.content %}}{{{{ raise_exception('no') }}}}{{% endif %}}{_SAYS}"
    )
    given = turns("user: a; assistant: ; user: b", assistant={"reasoning": "cut off"})
    assert rendered(source, given) == "user: a\n\nb"


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        ("(message.tool_calls or [])[:1]", "assistant: b\nprice-1{} tool: 1\nassistant: \nprice-2{} tool: 2"),
        ("message.tool_calls", "assistant: b\nprice-1{} price-2{} tool: 1\ntool: 2"),
    ],
)
def test_each_call_has_a_turn_of_its_own_where_the_template_writes_only_the_first(calls: str, written: str) -> None:
    shown = "{{ call.function.name ~ (call.function.arguments | tojson) }}"
    names = f"{_SAYS}{{% for call in {calls} %}}{shown} {{% endfor %}}"
    given = [*turns("user: a; assistant: b", assistant={"tool_calls": CALLS}), *RESULTS]
    assert rendered(ANYWHERE.replace(_SAYS, names), given) == f"user: a\n{written}"


def test_calls_that_a_template_leaves_out_stand_in_the_text_of_their_turn() -> None:
    shown, written = "<|tool_call|><|start_of_role|>", '<|tool_call|>[{"name": "price", "arguments": {"of": "</s>é"}}]'
    calls = [{"id": "1", "function": {"name": "price", "arguments": '{"of": "</s>é"}'}}]
    given = [*turns("user: a; assistant: b", assistant={"tool_calls": calls}), RESULTS[0]]
    template = ChatTemplate(byte_tokenizer(None), [], f"{{# {shown} #}}{ANYWHERE}", {}, ())
    text = template.render(given)
    assert text.strip() == f"user: a\nassistant: b{written}\ntool: 1"
    assert text[text.breaks[0] - 1 :].startswith("</s>")
    assert rendered(ANYWHERE, given) == "user: a\nassistant: b\ntool: 1"
    assert rendered(ANYWHERE, turns("assistant: b", assistant={"written_calls": "</s>"})) == "assistant: b"


def test_a_template_that_has_its_tools_as_a_text_gets_them_and_the_date() -> None:
    source = "{{ 'functools[' + functions + datetime }}"
    price = {"type": "function", "function": {"name": "price"}}
    text = ChatTemplate(byte_tokenizer(None), [price], source, {}, ()).render(turns("user: a"))
    assert re.fullmatch(r'functools\[\[.*"name": "price".*]\d{4}-\d\d-\d\d', text, re.DOTALL)
    assert (
        ChatTemplate(byte_tokenizer(None), [], source, {"datetime": "now"}, ()).render(turns("user: a"))
        == "functools[[]now"
    )


@pytest.mark.parametrize("call_id", ["call_abc123def456ghi789jkl012", "toolu_01A09q90qw90lq917835lq9", "call_0"])
def test_ids_of_calls_are_nine_letters_and_digits_where_the_template_takes_no_others(call_id: str) -> None:
    shows = "{% for call in message.tool_calls %}{{ call.id }} {% endfor %}{{ message.tool_call_id }}"
    checks = "{% for call in message.tool_calls or [message] if message.role in ('assistant', 'tool') %}"
    checks += "{% if (call.tool_call_id or call.id) | length != 9 %}{{ raise_exception('id') }}{% endif %}{% endfor %}"
    calls = [{**CALLS[0], "id": each} for each in (call_id, "Abc123456")]
    results = [{**RESULTS[0], "tool_call_id": call["id"]} for call in calls]
    given = [*turns("user: a; assistant: b", assistant={"tool_calls": calls}), *results]
    strict = rendered(ANYWHERE.replace(_SAYS, f"{checks}{_SAYS}{shows}"), given)
    first, kept = re.findall(r"\b[A-Za-z0-9]{9}\b", strict.partition("assistant")[2])[:2]
    assert strict == f"user: a\nassistant: b\n{first} {kept} tool: 1\n{first}tool: 1\n{kept}"
    assert kept == "Abc123456"
    assert rendered(ANYWHERE.replace(_SAYS, f"{_SAYS}{shows}"), given) == strict.replace(first, call_id)
    with_system = [*given, *turns("user: c; user: d")]
    alternating = rendered(ALTERNATES.replace(_SAYS, f"{checks}{_SAYS}{shows}"), with_system)
    assert alternating.endswith("user: c\n\nd")
    assert first in alternating


def test_a_conversation_that_no_form_helps_is_refused_for_its_own_reason() -> None:
    with pytest.raises(RequestError, match="never"):
        rendered(
            "{% if 'c' in messages[-1].content %}{{ raise_exception('never') }}{% endif %}", turns("user: b; user: c")
        )
