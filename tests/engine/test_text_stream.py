"""Stop strings, held-back text and injected text: the cut is the text's, however tokens divide it."""

import functools
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jinfercept.chat.text_stream import TextStream
from jinfercept.chat.tokenizer.tokenizer import Tokenizer

ALPHABET = "ab é"
WORDS = st.text(ALPHABET, max_size=12)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


@functools.cache
def vocabulary() -> Tokenizer:
    """Every single byte, every text of the alphabet up to three characters, and a special token, in that order."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    level: list[str] = [""]
    for _ in range(3):
        level = [text + char for text in level for char in ALPHABET]
        pieces += level
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore
    backend.add_special_tokens(["<call>"])
    return Tokenizer(backend)


def token(text: str) -> int:
    return vocabulary().to_transformers().convert_tokens_to_ids(text)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@st.composite
def divided(draw: st.DrawFn, text: str) -> list[int]:
    """The text as tokens of some division: single bytes here, up to three characters there."""
    ids: list[int] = []
    while text:
        length = draw(st.integers(0, min(3, len(text))))
        ids += [token(text[:length])] if length else bytes_of(text[0])
        text = text[length or 1 :]
    return ids


def make(stop: tuple[str, ...] = (), include_stop: bool = False, skip_special_tokens: bool = True) -> TextStream:
    return TextStream(vocabulary(), stop, include_stop, skip_special_tokens)


def feed(stream: TextStream, ids: list[int]) -> str:
    """Everything that is shown, through to the end."""
    shown = ""
    for token_id in ids:
        shown += stream.add(token_id)
        if stream.stopped is not None:
            break
    return shown + stream.finish()


def cut(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """What should be shown, character by character: the oracle."""
    for end in range(1, len(text) + 1):
        complete = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@given(st.data(), WORDS, STOPS, st.booleans())
def test_any_division_of_a_text_gives_the_same_cut(
    data: st.DataObject, text: str, stop: tuple[str, ...], include_stop: bool
) -> None:
    stream = make(stop, include_stop)
    shown = feed(stream, data.draw(divided(text)))
    assert (shown, stream.stopped) == cut(text, stop, include_stop)
    assert stream.text == shown


@given(st.data(), WORDS, STOPS)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    stream, read = make(stop), ""
    for token_id in data.draw(divided(text)):
        stream.add(token_id)
        if stream.stopped is not None:
            return
        read += stream.last_raw
        num_held = max((n for s in stop for n in range(len(s)) if read.endswith(s[:n])), default=0)
        assert stream.text == read[: len(read) - num_held]


@given(st.data(), WORDS, WORDS, WORDS, st.text(ALPHABET, min_size=1, max_size=4))
def test_injected_text_is_not_searched_and_separates_what_is(
    data: st.DataObject, before: str, returned: str, after: str, stop: str
) -> None:
    stream = make((stop,))
    shown = ""
    for token_id in data.draw(divided(before)):
        shown += stream.add(token_id)
        if stream.stopped is not None:
            assert shown == cut(before, (stop,), False)[0]
            return
    shown += stream.inject(data.draw(divided(returned)))
    assert shown == before + returned
    shown += feed(stream, data.draw(divided(after)))
    assert shown == stream.text
    assert shown == before + returned + cut(after, (stop,), False)[0]


def test_half_characters_do_not_cross_the_border_of_an_injection() -> None:
    first, second = bytes_of("é")
    stream = make()
    assert stream.add(first) == ""
    assert stream.inject([second, token("ab"), first]) == "\ufffd\ufffdab\ufffd"
    assert stream.add(second) == "\ufffd"


def test_the_end_releases_half_a_character_and_what_was_held() -> None:
    stream = make(("abb",))
    assert [stream.add(i) for i in (token("bab"), token("a"), bytes_of("é")[0])] == ["b", "ab", ""]
    assert stream.finish() == "a\ufffd"
    assert stream.finish() == ""
    assert stream.text == "baba\ufffd"


def test_nothing_follows_a_stop_string() -> None:
    stream = make(("ab",), include_stop=True)
    assert stream.add(token("abb")) == "ab"
    assert stream.finish() == ""
    assert (stream.text, stream.stopped, stream.last_raw) == ("ab", "ab", "abb")


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    stream = make(("a" * 50 + "b",))
    for _ in range(20_000):
        stream.add(token("aaa"))
    assert len(stream.text) == 60_000 - 50


def test_a_long_stop_string_takes_about_as_much_memory_as_its_text() -> None:
    stop = "ab" * 10_000
    tracemalloc.start()
    try:
        stream = make((stop,))
        assert feed(stream, [token("aba"), token("b"), token("é")]) == "ababé"
        assert tracemalloc.get_traced_memory()[1] < 10 * len(stop)
    finally:
        tracemalloc.stop()


def test_no_stop_string_ends_within_the_first_tokens_but_one_that_began_there_counts_afterwards() -> None:
    early = TextStream(vocabulary(), ("ab",), False, True, min_tokens=2)
    assert [early.add(token(text)) for text in ("ab", "bab", "a", "ba")] == ["ab", "bab", "", ""]
    assert (early.text, early.stopped) == ("abbab", "ab")
    end = token("<call>")
    across = TextStream(vocabulary(), ("ab",), False, True, min_tokens=2, turn_ends=frozenset({end}))
    across.add(end)
    assert [across.add(token("ba")), across.add(token("b"))] == ["b", ""]
    assert (across.text, across.stopped) == ("b", "ab")
