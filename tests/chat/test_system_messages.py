"""Conversations with several system messages, and templates that take one, none, or turns that alternate only."""

from typing import Any

import pytest

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
    return ChatTemplate(byte_tokenizer(None), [], source, {}, ()).render(messages).strip()


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


def test_a_conversation_that_no_form_helps_is_refused_for_its_own_reason() -> None:
    with pytest.raises(RequestError, match="never"):
        rendered(
            "{% if 'c' in messages[-1].content %}{{ raise_exception('never') }}{% endif %}", turns("user: b; user: c")
        )
