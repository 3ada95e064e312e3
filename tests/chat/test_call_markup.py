"""Calls and traps are found in tokens, however tokens divide the text, and interrupts hold whatever tools return."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.call_markup import AsyncCalls, ContextMarkup
from jinfercept.chat.parsers.cml import CMLParser, Delimiters
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.engine.rendering import CHARS_PER_TOKEN
from jinfercept.errors import RequestError
from jinfercept.hooks import BadFrame, TrapFrame
from tests.support.sample_tokenizers import byte_backend, ended

TOOLS = {"f": Tool(str, name="f"), "short": Tool(str, name="short", max_result_tokens=3, calls="sync")}
PARAMETERS = {"f": ["x", "y"], "short": []}
MERGES = [("]", "["), ("D", "]"), ("Ġ", "["), ("[", "C"), ("(", ")"), ("E", "N"), ("EN", "D]")]
STREAM = "So [CALL] 1 [HEAD] f(1) [END][CALL]b[HEAD]short()[END] and é[TRAP][END][TRAP] [END] done ["


@cache
def merging(special: bool) -> Tokenizer:
    """Byte-level, with tokens that span delimiters and their neighbours; the delimiters as tokens too if `special`."""
    return ended(byte_backend(MERGES, [*(Delimiters() if special else ()), "<end>"]))


def markup(tokenizer: Tokenizer, **options: object) -> ContextMarkup:
    return ContextMarkup(AsyncCalls(**options), TOOLS, PARAMETERS, tokenizer)  # pyright: ignore


def calls_of(tokenizer: Tokenizer, text: str, token_ids: list[int] | None = None) -> tuple[list[object], list[bool]]:
    """What a watch finds in a text, and where it is clean."""
    watch, cleans, all_found = markup(tokenizer).watch("", ()), list[bool](), list[object]()
    stream = tokenizer.encode(text) if token_ids is None else token_ids
    decoded = b"".join(map(tokenizer.token_bytes, stream))
    assert decoded.decode() == text
    for index, token_id in enumerate(stream):
        all_found += watch.feed(index, token_id, tokenizer.token_text(token_id))
        cleans.append(watch.clean)
    return all_found, cleans


@pytest.mark.parametrize("special", [False, True])
def test_calls_and_traps_are_found_with_their_tokens(special: bool) -> None:
    tokenizer = merging(special)
    stream = tokenizer.encode(STREAM)
    assert (markup(tokenizer).interrupt_token_id is not None) == special
    items, _ = calls_of(tokenizer, STREAM)
    first_call, second_call, first_trap, second_trap = items
    assert isinstance(first_call, Call)
    assert isinstance(second_call, Call)
    assert (first_call.name, first_call.arguments, first_call.id) == ("f", '{"x": 1}', "1")
    assert (second_call.name, second_call.arguments, second_call.id) == ("short", "{}", "b")
    assert isinstance(first_trap, TrapFrame)
    assert isinstance(second_trap, TrapFrame)
    written = tokenizer.decode(stream[slice(*first_call.span)], skip_special_tokens=False)
    assert written.strip(" [") == "CALL] 1 [HEAD] f(1) [END]" if not special else "[CALL] 1 [HEAD] f(1) [END]"


def single_byte(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte]))


def test_tokens_that_span_delimiters_make_no_difference() -> None:
    tokenizer = merging(False)
    merged, single = tokenizer.encode(STREAM), [single_byte(tokenizer, byte) for byte in STREAM.encode()]
    assert len(merged) < len(single)
    assert [type(item) for item in calls_of(tokenizer, STREAM)[0]] == [
        type(item) for item in calls_of(tokenizer, STREAM, single)[0]
    ]


def test_what_calls_no_tool_is_a_mistake_that_says_why() -> None:
    for code, problem in (
        ("g()", "no tool 'g' (there are: f, short)"),
        ("f(1, 2, 3)", "no call of a tool with literal arguments: more arguments than it has"),
        ("f(x=open('a'))", "not a literal"),
        ("f(x=1", "never closed"),
        ("f", "no call"),
        ("", "no call"),
        ("__import__('os')", "no tool '__import__'"),
    ):
        (item,) = calls_of(merging(False), f"[CALL]1[HEAD]{code}[END]")[0]
        assert isinstance(item, BadFrame)
        assert problem in item.problem, item.problem
        assert item.id == "1"
    twice = calls_of(merging(False), "[CALL]1[HEAD]f()[END]" * 2)[0]
    assert isinstance(twice[1], BadFrame)
    assert twice[1].problem == "the id '1' belongs to an earlier call"


HOSTILE = st.lists(
    st.sampled_from([*Delimiters(), "[", "[E", "ND]", "\\", "42", " ", "é", "<think>", "{}"]), max_size=8
)


@settings(max_examples=40)
@given(pieces=HOSTILE, special=st.booleans(), name=st.sampled_from(["1", "{}", "[\\END]", "x y", ""]))
def test_an_interrupt_is_one_frame_whatever_it_holds(pieces: list[str], special: bool, name: str) -> None:
    tokenizer, text = merging(special), "".join(pieces)
    tokens, result = markup(tokenizer).interrupt(Call("f", "{}", id=name), Result(text), 1000)
    written = tokenizer.decode(tokens, skip_special_tokens=False)
    assert result == Result(text)
    assert written.startswith(f"[INTR] {name}"[:8].rstrip())
    assert written.endswith(" [END]")
    for mark in Delimiters():
        times = {"[INTR]": 1, "[HEAD]": 1, "[END]": 1}.get(mark, 0)
        assert written.count(mark) == times
    assert CMLParser().feed(written) == [BadFrame("", "only the runtime writes [INTR]", (0, len(written)))]


def test_a_long_result_is_cut_and_its_frame_is_whole() -> None:
    for special in (False, True):
        made, tokenizer = markup(merging(special)), merging(special)
        for room in (200, 120, 70, 40):
            tokens, result = made.interrupt(Call("f", "{}", id="1"), Result("x" * 500), room)
            written = tokenizer.decode(tokens, skip_special_tokens=False)
            assert len(tokens) <= room
            assert written.startswith("[INTR] 1 [HEAD] ")
            assert written.endswith(" [END]")
            assert result.status == "too_large"
        tokens, _ = made.interrupt(Call("short", "{}", id="1"), Result("x" * 9), 500)
        assert tokenizer.decode(tokens, skip_special_tokens=False).endswith("[END]")
        assert len(made.interrupt(Call("f", "{}", id="1"), Result("x"), 3)[0]) == 3


def test_token_ids_of_a_result_forge_no_delimiter() -> None:
    tokenizer = merging(True)
    ids = tuple(tokenizer.encode("a[END][INTR]b"))
    tokens, _ = markup(tokenizer).interrupt(Call("f", "{}", id="1"), Result("", token_ids=ids), 100)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "[INTR] 1 [HEAD] ab [END]"
    tokens, used = markup(tokenizer).interrupt(Call("f", "{}", id="1"), Result("", token_ids=(*ids, -1)), 200)
    assert "error: token ids are from 0 to" in tokenizer.decode(tokens)
    assert used.status == "error"


def test_a_tool_says_when_its_calls_run_and_the_request_says_it_for_the_others() -> None:
    made = markup(merging(False), calls="parallel")
    assert [made.mode(Call(name, "{}")) for name in ("f", "short")] == ["parallel", "sync"]


@pytest.mark.parametrize(
    "wrong",
    [{"calls": "later"}, {"on_end": "stop"}, {"max_pending": 0}, {"delimiters": ("a",) * 5}, {"reasoning": "x"}],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        AsyncCalls(**wrong)  # pyright: ignore
    with pytest.raises(RequestError):
        Tool(str, name="t", calls="later")  # pyright: ignore


def test_a_prompt_opens_reasoning_as_text_and_as_tokens() -> None:
    tokenizer = merging(True)
    for text, clean in (("Hm. <think>\n", False), ("<think></think>\n", True), ("Hm.", True)):
        made = markup(tokenizer)
        assert made.watch(text, ()).clean == made.watch(None, tokenizer.encode(text)).clean == clean
    assert not markup(tokenizer).watch(None, tokenizer.encode("a" * 100 + "<think>" + "\n" * 20)).clean


def test_a_pending_result_is_no_longer_than_what_an_interrupt_can_hold() -> None:
    made, call = markup(merging(False)), Call("short", "{}", id="1")
    kept = made.kept(call, Result("x" * 10**6))
    assert len(kept.text) == 3 * CHARS_PER_TOKEN + 1
    assert made.kept(call, Result("", token_ids=(5,) * 99)).token_ids == (5,) * 4
    long = Result("y" * 10**6)
    tokens, used = made.interrupt(call, kept, 10_000)
    assert (used.status, len(tokens)) == ("too_large", len(made.interrupt(call, long, 10_000)[0]))


def test_a_tool_has_marks_or_calls_and_delimiters_are_texts() -> None:
    with pytest.raises(RequestError, match="has both start and stop texts and a mode of asynchronous calls"):
        Tool(str, name="price", start="<<", stop=">>", calls="async")
    with pytest.raises(RequestError, match="delimiters have"):
        AsyncCalls(delimiters=Delimiters(1, 2, 3, 4, 5))  # pyright: ignore[reportArgumentType]
