"""Calls by pattern and by token are found however tokens divide the text."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfercept.calls import Call
from jinfercept.chat.detector import MAX_ARGUMENT_CHARS, RegexDetector, TokenDetector
from jinfercept.errors import RequestError
from jinfercept.hooks import Detector

CALL = r"<(?P<name>\w+)\((?P<arguments>[^)]*)\)>"


def calls_of(detector: Detector, tokens: list[str]) -> list[Call]:
    """The calls in a text that comes as these tokens, the first of which is number 0."""
    watch = detector.watch()
    return [call for index, text in enumerate(tokens) for call in watch.feed(index, 0, text)]


def names_of(calls: list[Call]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


def test_groups_say_what_is_called_with_what_split_at_every_two_places() -> None:
    text = "so <calc(48/2)> is"
    for i in range(len(text)):
        for j in range(i, len(text)):
            (call,) = calls_of(RegexDetector(CALL), [text[:i], text[i:j], text[j:]])
            assert (call.name, call.arguments) == ("calc", "48/2")
            first = 0 if i > 3 else 1 if j > 3 else 2
            last = 0 if i > 14 else 1 if j > 14 else 2
            assert call.span == (first, last + 1)


def test_a_pattern_without_groups_calls_the_tool_with_all_of_its_match() -> None:
    detector = RegexDetector(re.compile(r"\[\d+\]"), tool="cite")
    assert names_of(calls_of(detector, list("see [12] and [3], [x]"))) == [("cite", "[12]"), ("cite", "[3]")]


def test_a_group_that_takes_no_part_is_empty() -> None:
    assert names_of(calls_of(RegexDetector(r"@(?P<name>\w+)(?: (?P<arguments>\d+))?;"), list("@now;"))) == [("now", "")]


def test_a_call_is_complete_at_the_first_character_at_which_the_pattern_matches() -> None:
    for tokens in (["#123"], list("#123"), ["#1", "23"]):
        assert names_of(calls_of(RegexDetector(r"#\d+", "t"), tokens)) == [("t", "#1")]
        assert names_of(calls_of(RegexDetector(r"#(?P<arguments>\d+) ", "t"), [*tokens, " "])) == [("t", "123")]


def test_anchors_mean_the_text_and_not_what_is_kept_of_it() -> None:
    assert calls_of(RegexDetector("^b", "t"), ["a" * (2 * MAX_ARGUMENT_CHARS + 2), "b"]) == []
    assert names_of(calls_of(RegexDetector("^b", "t"), ["b", "b", "a", "b"])) == [("t", "b"), ("t", "b")]


def test_a_match_is_at_most_so_long() -> None:
    detector = RegexDetector(r"<a*>", "t")
    for length, number in ((MAX_ARGUMENT_CHARS - 2, 1), (MAX_ARGUMENT_CHARS - 1, 0)):
        text = "x" * 5 + "<" + "a" * length + ">"
        for step in (7, 4096, 100_000):
            assert len(calls_of(detector, [text[at : at + step] for at in range(0, len(text), step)])) == number


@given(st.text("ab(<)>", max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_any_division_gives_the_same_first_call(text: str, cuts: list[int]) -> None:
    detector = RegexDetector(r"<(?P<name>[ab]+)\((?P<arguments>.*?)\)")
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    calls = names_of(calls_of(detector, [text[a:b] for a, b in pairwise(borders)]))
    match = re.search(r"<(?P<name>[ab]+)\((?P<arguments>.*?)\)", text)
    assert calls[:1] == ([(match["name"], match["arguments"])] if match else [])


@pytest.mark.parametrize(
    ("pattern", "tool", "word"),
    [("(", "t", "regular expression"), (3, "t", "regular expression"), ("a*", "t", "empty"), ("a+", None, "called")],
)
def test_a_pattern_that_cannot_work_is_refused(pattern: str, tool: str | None, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        RegexDetector(pattern, tool)


def test_a_token_calls_with_the_text_since_the_opening_token() -> None:
    watch = TokenDetector({8: "search", 9: "stop"}, opening=7).watch()
    stream = [
        (1, "a"),
        (7, "<open>"),
        (2, "b"),
        (3, "c"),
        (8, "<call>"),
        (4, "d"),
        (9, "<end>"),
        (7, ""),
        (7, ""),
        (5, "e"),
        (8, ""),
    ]
    calls = [call for index, (token, text) in enumerate(stream) for call in watch.feed(index, token, text)]
    assert calls == [Call("search", "bc", (1, 5)), Call("stop", "", (6, 7)), Call("search", "e", (8, 11))]


def test_a_token_without_an_opening_one_calls_with_nothing() -> None:
    watch = TokenDetector({8: "now"}).watch()
    assert watch.feed(0, 1, "some text") == ()
    assert watch.feed(1, 8, "") == (Call("now", "", (1, 2)),)


def test_text_that_is_too_long_for_an_argument_is_none() -> None:
    for length, arguments in ((MAX_ARGUMENT_CHARS, "a" * MAX_ARGUMENT_CHARS), (MAX_ARGUMENT_CHARS + 1, "")):
        watch = TokenDetector({8: "t"}, opening=7).watch()
        watch.feed(0, 7, "")
        watch.feed(1, 1, "a" * length)
        ((call),) = watch.feed(2, 8, "")
        assert call.arguments == arguments


def test_tokens_that_are_none_are_refused() -> None:
    for calls, opening in (
        *(({}, None), ({"a": "t"}, None), ({8: "t"}, "x"), ({True: "t"}, None)),
        *((None, None), ([8], None), ({-1: "t"}, None), ({8: 5}, None), ({8: "t"}, -1)),
    ):
        with pytest.raises(RequestError, match="token ids"):
            TokenDetector(calls, opening)  # pyright: ignore[reportArgumentType]
