"""Whatever a model writes, a parser neither fails nor shows markup; and calls that are written well are found."""

import json
import keyword
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.parsers.source import ToolSchemas
from jinfercept.events import Content
from tests.support.call_corpus import WRITTEN, Turn, corpus, joined, parsed, pieces_of, xml_call

UNTAGGED_AT_START = ("llama3_json", "pythonic")
"""Formats in which a call without a tag counts only where the turn begins."""
EVERY_FORMAT = pytest.mark.parametrize("name", sorted(FORMATS))
TURNS = corpus()
MARKS = sorted(
    {mark for format in FORMATS.values() for mark in (*format.tags, *format.turn_ends, *format.openings)} - {"{"}
)
FRAGMENTS = [
    *MARKS,
    *(mark[:length] for mark in MARKS for length in (1, 4, len(mark) - 1)),
    *"{}[]()\"'\\,:;=<> \n\té😀\x00\u2028a0-.",
    *('{"name": "f", "arguments": ', '"name"', '"parameters"', '"id"', "{}", "{'name': 'g', 'arguments': {}}", '"f"'),
    *(
        "f>",
        "a>",
        "json",
        "</tools>",
        "f",
        "[f(",
        "a=1",
        "from=",
        "b='",
        "null",
        "None",
        "1e999",
        '"""',
        "\\ud800",
        "\\u00e9",
        "f.call(",
        "text ",
    ),
]
WILD = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=25).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)
TOOLS: ToolSchemas = {"f": {"properties": {"a": {"type": "integer"}, "b": {"type": ["array", "null"]}}}, "g": {}}


@st.composite
def mutated(draw: st.DrawFn) -> Turn:
    """A turn of the corpus with pieces of it, or of another one, lost, doubled, or put elsewhere."""
    turn: Turn = draw(st.sampled_from(TURNS))
    text = turn.text
    for _ in range(draw(st.integers(1, 4))):
        first, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        other = draw(
            st.sampled_from(FRAGMENTS) | st.just(text[first:end]) | st.sampled_from(TURNS).map(lambda t: t.text)
        )
        text = draw(st.sampled_from([text[:first] + text[end:], text[:first] + other + text[first:], text[:end]]))
    return turn._replace(text=text)


def check(name: str, text: str, cuts: list[int], tools: ToolSchemas | None = None) -> None:
    """However the text is divided, it says the same; it shows no markup, and where there is neither markup nor call all of it.

    The text on both sides of a tag may make up a tag anew, `<tool_<tool_call>call>`, which no parser can know in time.
    """
    pieces = pieces_of(name, [text], tools)
    whole = joined(pieces)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parsed(name, [text[a:b] for a, b in pairwise(borders)], tools) == whole
    assert parsed(name, text, tools) == whole
    shown = [piece.text for piece in pieces if isinstance(piece, Content)]
    marks = (*FORMATS[name].tags, *FORMATS[name].turn_ends)
    assert not any(mark in run for mark in marks for run in shown)
    if all(piece[0] == "content" for piece in whole) and not any(mark in text for mark in marks):
        assert "".join(shown) == text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(MARKS)
    | st.text(max_size=9),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES | st.sampled_from([*keyword.softkwlist, "from", "in"]), JSON, max_size=4)),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)
PROSE = st.sampled_from(["", "Let me see.", "a < b, [1] {x} é😀", "Über <tool"])


def written(name: str, form: int, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as the family writes them; `form` picks among ways that are all right."""
    indent, ascii_only = (None, 2)[form % 2], form % 3 == 0
    arguments = "parameters" if name == "llama3_json" else "arguments"

    def dumped(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    if name == "qwen3_coder":
        return "\n".join(xml_call(called, values, dumped if form % 3 else repr) for called, values in calls)
    if name in WRITTEN:
        return WRITTEN[name](calls)
    objects = [dumped({"name": called, arguments: values}) for called, values in calls]
    if name == "hermes" and form % 3 == 0:
        fences = (("\n```json\n", "\n```"), ("\n", ""), ("\n<tools>", "</tools>"))[form // 4]
        return "\n".join(objects).join(fences)
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{call_json}\n</tool_call>" for call_json in objects) + "<|im_end|>" * (form % 2)
    if name == "llama3_json":
        return ("", "<|python_tag|>")[form % 2] + "; ".join(objects) + "<|eom_id|>"
    if name == "mistral" and form % 4 < 2:
        return f"[TOOL_CALLS] [{', '.join(objects)}]</s>"
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{called}{'[ARGS]' * (form % 2)}{dumped(values)}" for called, values in calls)
    spoken = [f"{called}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for called, values in calls]
    return ("", FORMATS[name].tags[0])[form % 2] + f"[{', '.join(spoken)}]" + FORMATS[name].turn_ends[0]


def declared(calls: list[tuple[str, dict[str, Any]]]) -> ToolSchemas:
    """Schemas that say of every argument what it is."""
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return {
        called: {"properties": {key: {"type": kinds.get(type(value), "object")} for key, value in values.items()}}
        for called, values in calls
    }


@EVERY_FORMAT
@given(text=WILD, cuts=CUTS, tools=st.sampled_from([TOOLS, None]))
def test_any_text_gives_the_same_pieces_however_it_is_divided(
    name: str, text: str, cuts: list[int], tools: ToolSchemas | None
) -> None:
    check(name, text, cuts, tools)


@settings(max_examples=max(80, settings().max_examples))
@given(turn=mutated(), cuts=CUTS)
def test_broken_turns_raise_nothing(turn: Turn, cuts: list[int]) -> None:
    check(turn.format, turn.text, cuts, turn.tools)


@EVERY_FORMAT
@given(form=st.integers(0, 11), prose=PROSE, calls=CALLS, cuts=CUTS)
def test_calls_that_are_written_well_are_found(
    name: str, form: int, prose: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    """Calls behind some prose are found, with exactly their arguments, and the prose is all that is shown."""
    prose = "" if name in UNTAGGED_AT_START and form % 2 == 0 else prose
    text = prose + written(name, form, calls)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = parsed(name, [text[a:b] for a, b in pairwise(borders)], declared(calls))
    content = [("content", prose)] if prose else []
    assert [piece[:2] for piece in pieces] == content + [("call", called) for called, _ in calls]
    assert [json.loads(piece[2]) for piece in pieces if piece[0] == "call"] == [values for _, values in calls]
