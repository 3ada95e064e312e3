"""Reasoning is separated from the answer however the text is divided, and no part of a mark is shown."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.parsers.reasoning import (
    REASONING_FORMATS,
    Beginning,
    PlainParser,
    ReasoningParser,
    TrailingCalls,
    detect_reasoning_format,
)
from jinfercept.chat.parsers.source import ToolSchemas
from jinfercept.events import CallEnded, Content, Piece, Reasoning
from tests.support.call_corpus import joined, parsed

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLED = ("call", "f", '{"a": 1}')


def read(parts: list[str] | str, beginning: Beginning, format: str | None = None, name: str = "qwen3") -> list[Piece]:
    answer = FORMATS[format].parser(lambda: "made up") if format else PlainParser()
    parser = ReasoningParser(REASONING_FORMATS[name], beginning, answer)
    return [piece for part in parts for piece in parser.feed(part)] + parser.finish()


@pytest.mark.parametrize(
    ("beginning", "text", "pieces"),
    [
        ("undecided", "<think>\nA lamp.\n</think>\n\n23.", [("reasoning", "A lamp."), ("content", "23.")]),
        ("undecided", "\n <think>a</think>b", [("reasoning", "a"), ("content", "b")]),
        ("undecided", "<think>\n\n</think>\n\n23.", [("content", "23.")]),
        ("undecided", "23. <think>x</think>", [("content", "23. <think>x</think>")]),
        ("undecided", "<thin air", [("content", "<thin air")]),
        ("undecided", " \n", [("content", " \n")]),
        ("undecided", "<thi", [("content", "<thi")]),
        ("undecided", "</think>\n\n23.", [("content", "23.")]),
        ("undecided", "</thin air", [("content", "</thin air")]),
        ("undecided", "<think>never ends </thin", [("reasoning", "never ends </thin")]),
        ("undecided", "<think>", []),
        (
            "thinking",
            "A lamp.\n\nOr two?\n</think>\n23.\n",
            [("reasoning", "A lamp.\n\nOr two?"), ("content", "23.\n")],
        ),
        ("thinking", "<think>\nA lamp.</think>23.", [("reasoning", "A lamp."), ("content", "23.")]),
        ("thinking", "\n</think>", []),
        ("thinking", "a < b </ c </think", [("reasoning", "a < b </ c </think")]),
        ("thinking", "a</think> \n", [("reasoning", "a")]),
        ("thinking", "a</think>b</think>c", [("reasoning", "a"), ("content", "b</think>c")]),
        ("thinking", "a</think>\n</think>\n\nb", [("reasoning", "a"), ("content", "b")]),
        (
            "thinking",
            "a</think>b\n<think>\nc\n</think>\n\nd",
            [("reasoning", "a"), ("content", "b\n"), ("reasoning", "\n\nc"), ("content", "d")],
        ),
        (
            "undecided",
            "<think>a</think>b<think>c</think>d",
            [("reasoning", "a"), ("content", "b"), ("reasoning", "\n\nc"), ("content", "\n\nd")],
        ),
        ("undecided", "<think></think>b<think>c", [("content", "b"), ("reasoning", "c")]),
        ("thinking", "a</think><think>c</think></think>d", [("reasoning", "a\n\nc"), ("content", "d")]),
        ("thinking", "a</think>b<think></think>d", [("reasoning", "a"), ("content", "b\n\nd")]),
        ("thinking", "a</think>Write `<think>`.", [("reasoning", "a"), ("content", "Write `<think>`.")]),
        ("thinking", "a</think>```\n<think>\n```", [("reasoning", "a"), ("content", "```\n<think>\n```")]),
        ("thinking", 'a</think>Write "<think>".', [("reasoning", "a"), ("content", 'Write "<think>".')]),
        ("thinking", "a</think>b <thi", [("reasoning", "a"), ("content", "b <thi")]),
        ("answering", "<think>23.", [("content", "<think>23.")]),
        ("answering", "a</think>b<think>c", [("content", "a</think>b<think>c")]),
        ("answering", " 23. </think>", [("content", " 23. </think>")]),
        ("answering", "\n</think>\n\n23.", [("content", "23.")]),
        ("undecided", "</thin", [("content", "</thin")]),
    ],
)
def test_reasoning_and_answer_are_told_apart_however_the_text_is_divided(
    beginning: Beginning, text: str, pieces: list[tuple[str, ...]]
) -> None:
    assert joined(read([text], beginning)) == pieces
    assert joined(read(text, beginning)) == pieces
    for at in range(1, len(text)):
        assert joined(read([text[:at], text[at:]], beginning)) == pieces


@pytest.mark.parametrize("beginning", ["undecided", "thinking"])
def test_reasoning_behind_a_call_is_reasoning(beginning: Beginning) -> None:
    text = (
        f"{'a</think>' if beginning == 'thinking' else ''}{CALL}\n<think>\nb <think> {CALL}\n</think>\n{CALL}\n<think>c"
    )
    first = [("reasoning", "a")] if beginning == "thinking" else []
    gap = "\n\n" * len(first)
    expected = [*first, CALLED, ("reasoning", f"{gap}b <think> {CALL}"), CALLED, ("reasoning", "\n\nc")]
    for at in range(1, len(text)):
        assert joined(read([text[:at], text[at:]], beginning, "hermes")) == expected
    assert joined(read(text, beginning, "hermes")) == expected
    quoted = CALL.replace("1", '"<think>b</think>"')
    assert joined(read(f"a</think>{quoted}", "thinking", "hermes"))[1:] == [("call", "f", '{"a": "<think>b</think>"}')]


@pytest.mark.parametrize("name", ["gemma4", "mistral", "apriel"])
def test_every_family_may_think_again_behind_a_text(name: str) -> None:
    form = REASONING_FORMATS[name]
    text = "".join(f"{form.opening}{a}{form.closing}{b}" for a, b in ("ab", "cd"))
    expected = [("reasoning", "a"), ("content", "b"), ("reasoning", "\n\nc"), ("content", "\n\nd")]
    assert joined(read(text, "undecided", name=name)) == expected


def test_a_call_that_is_only_thought_of_is_none() -> None:
    text = f"<think>I could write {CALL}.</think>\n{CALL}"
    reasoning, call = joined(read(text, "undecided", "hermes"))
    assert reasoning == ("reasoning", f"I could write {CALL}.")
    assert call == CALLED
    assert joined(read(f"<think>{CALL}", "undecided", "hermes")) == [("reasoning", CALL)]


XML = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
OTHER = CALL.replace('"f"', '"g"')


@pytest.mark.parametrize(
    ("format", "text", "pieces"),
    [
        ("hermes", f"Hm.\n{CALL}", [("reasoning", "Hm."), CALLED]),
        ("hermes", f"Hm.\n\n{CALL}\n{CALL}\n<|im_end|>", [("reasoning", "Hm."), CALLED, CALLED]),
        ("hermes", CALL, [CALLED]),
        ("hermes", f" <think>\n{CALL}", [CALLED]),
        ("hermes", f"{CALL} or {CALL}", [("reasoning", f"{CALL} or"), CALLED]),
        ("hermes", f"<tool_call>No. <tool_{CALL}", [("reasoning", "<tool_call>No. <tool_"), CALLED]),
        ("hermes", f"<tool_call>No. <tool_call>{CALL}", [("reasoning", "<tool_call>No."), CALLED]),
        ("hermes", f"I could write {CALL}.", [("reasoning", f"I could write {CALL}.")]),
        ("hermes", f"{OTHER}", [("reasoning", OTHER)]),
        ("hermes", CALL[:-25], [("reasoning", CALL[:-25])]),
        ("hermes", "</tool_call>", [("reasoning", "</tool_call>")]),
        ("hermes", f"{CALL}</think>So.", [("reasoning", CALL), ("content", "So.")]),
        ("hermes", f"{CALL}</think>", [("reasoning", CALL)]),
        ("hermes", f"{CALL}</thin", [("reasoning", f"{CALL}</thin")]),
        ("qwen3_coder", f"Hm. {XML}", [("reasoning", "Hm."), CALLED]),
        ("mistral", 'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}', [("reasoning", "Hm."), CALLED]),
        ("llama3_json", 'Hm. <|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("reasoning", "Hm."), CALLED]),
        ("pythonic", "Hm. <|python_tag|>[f(a=1)]", [("reasoning", "Hm."), CALLED]),
    ],
)
def test_calls_with_which_reasoning_ends_that_never_closed_are_calls(
    format: str, text: str, pieces: list[tuple[str, ...]]
) -> None:
    form = replace(FORMATS[format], tools={"f": {"properties": {"a": {"type": "integer"}}}})

    def read(parts: list[str] | str, cut: bool = False) -> list[Piece]:
        calls = partial(TrailingCalls, form.tags, lambda: form.parser(lambda: "made up"), form.tools)
        parser = ReasoningParser(REASONING_FORMATS["qwen3"], "thinking", form.parser(), calls)
        return [piece for part in parts for piece in parser.feed(part)] + parser.finish(cut)

    assert joined(read([text])) == pieces
    for at in range(1, len(text)):
        assert joined(read([text[:at], text[at:]])) == pieces
    single = read(text)
    assert joined(single) == pieces
    for piece in single:
        if isinstance(piece, CallEnded):
            written = text[slice(*piece.call.span)]
            assert written.startswith(("{", "f"))
            assert written[-1] in "}>)"
    if "</think>" not in text:
        assert not any(isinstance(piece, CallEnded) for piece in read(text, cut=True))


def test_a_call_without_a_tag_counts_behind_the_reasoning() -> None:
    text = '<think>\nHm.\n</think>\n\n{"name": "f", "parameters": {"a": 1}}'
    assert joined(read(text, "undecided", "llama3_json")) == [("reasoning", "Hm."), CALLED]


def test_reasoning_streams_as_it_comes_but_for_white_space_and_what_may_be_a_mark() -> None:
    parser = ReasoningParser(REASONING_FORMATS["qwen3"], "undecided", PlainParser())
    assert parser.feed("<thi") == []
    assert parser.feed("nk>\nA ") == [Reasoning("A")]
    assert parser.feed("lamp. <") == [Reasoning(" lamp.")]
    assert parser.feed("b>\n") == [Reasoning(" <b>")]
    assert parser.feed("</think>\n") == []
    assert parser.feed("\n23. ") == [Content("23. ")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "prompt", "beginning"),
    [
        ("qwen3", "<|im_start|>assistant\n", "undecided"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "thinking"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "answering"),
        ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "undecided"),
        ("deepseek_r1", "<｜Assistant｜>", "thinking"),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "thinking"),
        ("deepseek_r1", "<｜Assistant｜><think>\n\n</think>\n", "answering"),
    ],
)
def test_the_prompt_says_whether_reasoning_has_begun(name: str, prompt: str, beginning: Beginning) -> None:
    assert REASONING_FORMATS[name].beginning(prompt) == beginning


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if '</think>' in content %}{{- '<think>\\n' + reasoning_content }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜>' }}", "deepseek_r1"),
        ("{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜><think>\\n' }}", "qwen3"),
        ("{{ '[THINK]' + thinking + '[/THINK]' }}", "mistral"),
        ("{%- set think_end_token = '</seed:think>' %}{{ '<seed:think>' }}", None),
        ("{{ '<|channel>thought\\n' + thinking + '\\n<channel|>' }}", "gemma4"),
        ("{{ 'Here are my reasoning steps:\n' }}{{ text.split('[BEGIN FINAL RESPONSE]')[-1] }}", "apriel"),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_gives_the_marks_away(template: str, name: str | None) -> None:
    assert detect_reasoning_format(template) == name


FRAGMENTS = [
    "<think>",
    "</think>",
    "<th",
    "</thi",
    "ink>",
    "<",
    " ",
    "\n",
    "a",
    "é😀",
    "</",
    CALL,
    "<tool_call>",
    "{",
    "`",
    '"',
]


@settings(max_examples=60)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=15).map("".join),
    cuts=st.lists(st.integers(0, 150), max_size=8),
    beginning=st.sampled_from(["thinking", "undecided", "answering"]),
    format=st.sampled_from([None, "hermes", "llama3_json", "qwen3_coder"]),
)
def test_any_text_gives_the_same_pieces_however_it_is_divided(
    text: str, cuts: list[int], beginning: Beginning, format: str | None
) -> None:
    pieces = read([text], beginning, format)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert joined(read([text[a:b] for a, b in pairwise(borders)], beginning, format)) == joined(pieces)
    assert joined(read(text, beginning, format)) == joined(pieces)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    assert "</think>" not in thought
    assert thought == thought.strip()
    assert not thought.startswith("<think>")


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
THOUGHT, START = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{THOUGHT}{START}{HARMONY_CALL}", [("reasoning", "Hm."), ("call", "f", '{"a": 1}')]),
        (
            f"{THOUGHT}{START}<|channel|>final<|message|>Yes.<|return|>",
            [("reasoning", "Hm."), ("content", "Yes.")],
        ),
        (f"{THOUGHT}{START}{THOUGHT}{START}{HARMONY_CALL}", [("reasoning", "Hm."), ("call", "f", '{"a": 1}')]),
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
    text = f"<|channel|>commentary<|message|>Well.<|end|>{START}{HARMONY_CALL}"
    assert parsed("openai", [text], tools) == [("content", "Well."), *called]
