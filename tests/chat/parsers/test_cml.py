"""Frames are found however their text is divided, in both spellings, and results cannot forge one."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.chat.parsers.cml import MAX_FRAME_CHARS, CallFrame, CMLParser, Delimiters, Frame, Mark, escape
from jinfercept.chat.parsers.python_calls import UNREADABLE, parse_call
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS
from jinfercept.hooks import BadFrame, TrapFrame

MARKS = dict(zip(Delimiters(), Delimiters._fields, strict=True))
THINK = REASONING_FORMATS["qwen3"]
PIECES = [
    *("'", '"', '"""', "\n"),
    *MARKS,
    *MARKS,
    "[CAL",
    "L]",
    "[",
    "]",
    "<think>",
    "</think>",
    "<thi",
    " ",
    "7",
    "f(x=1)",
    "x" * 40,
    "\\",
    "é",
]
TEXTS = st.lists(st.sampled_from([*PIECES, "[CALL]7[HEAD]f()[END]", "[TRAP][END]", "y" * MAX_FRAME_CHARS]), max_size=12)


def read(parts: list[str], thinking: bool = False) -> tuple[list[Frame], bool]:
    parser = CMLParser(reasoning=THINK, thinking=thinking)
    return [frame for part in parts for frame in parser.feed(part)], parser.clean


def kinds(text: str) -> list[str | tuple[str, str]]:
    """The frames of a text in short: calls with id and code, traps, and what is wrong."""
    frames, _ = read([text])
    return [
        (frame.id, frame.code) if isinstance(frame, CallFrame) else "trap" if isinstance(frame, TrapFrame) else frame[1]
        for frame in frames
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm. [CALL] 1 [HEAD] f(a=[1]) [END] and", [("1", "f(a=[1])")]),
        ("[CALL]a[HEAD]f()[END][CALL]b[HEAD]g()[END][TRAP][END]", [("a", "f()"), ("b", "g()"), "trap"]),
        ("[CALL]1[HEAD]f([HEAD])[END]", [("1", "f([HEAD])")]),
        ("[CALL]1[HEAD]f(a='<think>')[END]", [("1", "f(a='<think>')")]),
        ("[TRAP] please [END]", ["trap"]),
        ("[END] [HEAD] [CAL] [TRAP", []),
        ("[CALL]f()[END]", ["no [HEAD] between its id and its code"]),
        ("[CALL] [HEAD]f()[END]", ["no id between [CALL] and [HEAD]"]),
        ("[CALL]" + "1" * 65 + "[HEAD]f()[END]", ["an id of more than 64 characters"]),
        ("[CALL]1[HEAD]f([CALL]2[HEAD]g()[END]", ["no [END] before the next [CALL]", ("2", "g()")]),
        ("[CALL]1[HEAD]f([TRAP][END]", ["no [END] before the next [TRAP]", "trap"]),
        ("[INTR]1[HEAD]42[END] so", ["only the runtime writes [INTR]"]),
        ("[CALL]1[HEAD]" + "x" * 9000 + "[END][TRAP][END]", ["no [END] within 8192 characters", "trap"]),
        ("<think>[CALL]1[HEAD]f()[END]</think>[TRAP][END]", ["trap"]),
        ("<think>[CALL]", []),
        ("[CALL]1[HEAD]f(a='[CALL]2[HEAD]g()[END]')[END]", [("1", "f(a='[CALL]2[HEAD]g()[END]')")]),
        ('[CALL]1[HEAD]f(a="""\n\'[TRAP][END]""")[END]', [("1", 'f(a="""\n\'[TRAP][END]""")')]),
        ('[CALL]1[HEAD]f(a=\'\\\\\', b="\\"[END]")[END]', [("1", 'f(a=\'\\\\\', b="\\"[END]")')]),
        ("[CALL]1[HEAD]it's[END]", [("1", "it's")]),
        ("[CALL]1[HEAD]f('\n[END][TRAP][END]", [("1", "f('"), "trap"]),
        ("[CALL]1[HEAD]'" + "x" * 8188 + "[END][TRAP][END]", ["no [END] within 8192 characters", "trap"]),
    ],
)
def test_frames_of_a_text(text: str, expected: list[str | tuple[str, str]]) -> None:
    assert kinds(text) == expected
    frames, _ = read([text])
    assert all(text[frame.span[0] :].startswith("[") for frame in frames)


def test_a_result_may_follow_outside_frames_reasoning_and_half_written_marks() -> None:
    text, clean = "a[<b>[CALL]1[HEAD]f()[END]<think>[</think>[TRAP] [END].", ""
    parser = CMLParser(reasoning=THINK)
    for char in text:
        parser.feed(char)
        clean += "+" if parser.clean else "-"
    assert clean == "+--++" + "-" * 20 + "+" + "-" * 15 + "+" + "-" * 11 + "++"
    assert CMLParser(reasoning=THINK, thinking=True).clean is False


def test_the_end_of_a_text_closes_what_is_open() -> None:
    parser = CMLParser(reasoning=THINK)
    for text, open_frames in (
        ("[CALL]1[HEAD]", [BadFrame("1", "no [END] before the end of the text", (0, 13))]),
        ("<think>", []),
        ("[TR", []),
    ):
        assert parser.feed(text) == []
        assert parser.end() == open_frames
        assert parser.clean
    assert parser.feed("[CALL]2[HEAD]f()[END]") == [CallFrame("2", "f()", (23, 44))]


@settings(max_examples=100)
@given(pieces=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8), thinking=st.booleans())
def test_how_a_text_is_divided_makes_no_difference(pieces: list[str], cuts: list[int], thinking: bool) -> None:
    text = "".join(pieces)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[first:end] for first, end in pairwise(borders)]
    whole = read([text], thinking=thinking)
    assert read(parts, thinking=thinking) == whole
    assert read([*text], thinking=thinking) == whole


@settings(max_examples=80)
@given(pieces=st.lists(st.sampled_from([*MARKS, *MARKS, " ", "7", "f(x=1)", "<think>", "</think>"]), max_size=12))
def test_both_spellings_have_the_same_frames(pieces: list[str]) -> None:
    special, frames = CMLParser(reasoning=THINK, written=False), list[Frame]()
    for piece in pieces:
        mark: Mark | None = MARKS.get(piece)  # pyright: ignore
        frames += special.feed_mark(mark) if mark else special.feed(piece)
    assert (frames, special.clean) == read(pieces)


def test_text_is_no_delimiter_where_delimiters_are_tokens() -> None:
    parser = CMLParser(written=False)
    assert parser.feed("[CALL]1[HEAD]f()[END][TRAP][END]") == []
    assert parser.clean


@settings(max_examples=80)
@given(pieces=st.lists(st.sampled_from([*MARKS, "[", "\\", "END]", "[E", "a"]), max_size=8))
def test_an_escaped_text_holds_no_delimiter_and_can_be_read_back(pieces: list[str]) -> None:
    text = "".join(pieces)
    escaped = escape(text)
    assert not any(mark in escaped for mark in MARKS)
    assert read([f"[CALL]1[HEAD]{escaped}[END]"])[0] == [
        CallFrame("1", escaped.strip(), (0, len(escaped) + 18)),
    ]
    names = "|".join(mark[1:-1] for mark in MARKS)
    assert re.sub(rf"\[(\\*)\\({names})\]", r"[\1\2]", escaped) == text


def test_delimiters_that_overlap_are_not_distinct() -> None:
    assert Delimiters().are_distinct
    assert Delimiters("<c>", "<h>", "<e>", "<t>", "<i>").are_distinct
    for wrong in ("\\a", "a\\b", "x" * 65, "[HEAD]", "", "x", "]]", "EAD", "[[END]]", "][CALL"):
        assert not Delimiters(call=wrong).are_distinct, wrong


def test_the_code_of_a_call_is_read_and_never_run() -> None:
    parameters = {"f": ["a", "b"], "g": []}
    assert parse_call("f(1, b='x')", parameters) == ("f", '{"a": 1, "b": "x"}')
    assert parse_call("g( )", parameters) == ("g", "{}")
    for code in (
        "f(1, 2, 3)",
        "f(1, a=1)",
        "g(1)",
        "f(g())",
        "f(*[1])",
        "f",
        "f(",
        "f() + 1",
        "1(2)",
        "f(a=1, a=2)",
        "f(1)(2)",
        "f(1).g()",
        "",
    ):
        with pytest.raises(UNREADABLE):
            parse_call(code, parameters)


def test_a_bad_frame_has_the_id_as_far_as_there_is_one() -> None:
    frames, _ = read(["[CALL]9[HEAD]f([CALL]f()[END]"])
    assert frames == [
        BadFrame("9", "no [END] before the next [CALL]", (0, 15)),
        BadFrame("", "no [HEAD] between its id and its code", (15, 29)),
    ]
