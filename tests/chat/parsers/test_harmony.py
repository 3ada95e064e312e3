"""Turns of gpt-oss, whose text stands in markup as its calls do."""

import pytest

from jinfercept.chat.parsers.formats import FORMATS, detect_format
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS, ReasoningParser, detect_reasoning_format
from jinfercept.chat.parsers.source import ToolSchemas
from tests.support.call_corpus import joined, parsed

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
TEMPLATE = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
THOUGHT, START = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{THOUGHT}{START}{CALL}", [("reasoning", "Hm."), ("call", "f", '{"a": 1}')]),
        (
            f"{THOUGHT}{START}<|channel|>final<|message|>Yes.<|return|>",
            [("reasoning", "Hm."), ("content", "Yes.")],
        ),
        (f"{THOUGHT}{START}{THOUGHT}{START}{CALL}", [("reasoning", "Hm."), ("call", "f", '{"a": 1}')]),
        ("<|channel|>final<|message|>Yes.<|return|>", [("content", "Yes.")]),
    ],
)
def test_reasoning_is_what_the_analysis_is_that_a_turn_begins_with(text: str, pieces: list[tuple[str, ...]]) -> None:
    for parts in ([text], list(text)):
        answer = FORMATS["openai"].parser(lambda: "made up")
        parser = ReasoningParser(REASONING_FORMATS["openai_gptoss"], "undecided", answer)
        assert joined([piece for part in parts for piece in parser.feed(part)] + parser.finish()) == pieces


@pytest.mark.parametrize(("tools", "called"), [({}, []), (None, [("call", "f", '{"a": 1}')])])
def test_where_no_tool_is_offered_a_call_is_dropped(tools: ToolSchemas | None, called: list[tuple[str, ...]]) -> None:
    text = f"<|channel|>commentary<|message|>Well.<|end|>{START}{CALL}"
    assert parsed("openai", [text], tools) == [("content", "Well."), *called]


def test_the_template_gives_the_format_and_its_reasoning_away() -> None:
    assert (detect_format(TEMPLATE), detect_reasoning_format(TEMPLATE)) == ("openai", "openai_gptoss")
