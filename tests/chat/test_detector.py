"""A call is found in the text, however tokens divide it."""

from hypothesis import example, given
from hypothesis import strategies as st

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import MAX_ARGUMENT_CHARS, ScriptedDetector, StopStringDetector

ALPHABET = "ab<="
MARKS = st.text(ALPHABET, min_size=1, max_size=3)
TOOLS = st.lists(st.tuples(MARKS, MARKS), min_size=1, max_size=3)


def tool(name: str, start: str | None = None, stop: str | None = None) -> Tool:
    return Tool(str, name=name, start=start, stop=stop)


def calls_of(tools: list[Tool], tokens: list[str]) -> list[Call]:
    """The calls in a text that comes as these tokens, the first of which is number 0."""
    watch = StopStringDetector(tools).watch()
    return [call for index, text in enumerate(tokens) for call in watch.feed(index, 0, text)]


def names_of(calls: list[Call]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


def first_call(tools: list[Tool], text: str) -> tuple[str, str, int, int] | None:
    """The oracle: name, arguments, first character and the character after the last, with the whole text at hand."""
    openings = [(at, -len(tool.start), tool) for tool in tools if tool.start and (at := text.find(tool.start)) >= 0]
    if not openings:
        return None
    at, length, opened = min(openings, key=lambda opening: opening[:2])
    assert opened.stop is not None
    end = text.find(opened.stop, at - length)
    return (opened.name, text[at - length : end], at, end + len(opened.stop)) if end >= 0 else None


def test_start_and_stop_may_be_the_same() -> None:
    assert names_of(calls_of([tool("quote", "``", "``")], list("``a`b```` c``d``"))) == [
        ("quote", "a`b"),
        ("quote", " c"),
    ]


def test_after_a_call_the_search_begins_anew_with_the_next_token() -> None:
    tools = [tool("calc", "<<", "=")]
    calls = calls_of(tools, ["<<1", "=<", "<2=", " <<3", "="])
    assert [(call.arguments, call.span) for call in calls] == [("1", (0, 2)), ("3", (3, 5))]


def test_an_argument_that_never_ends_is_given_up_and_what_follows_is_searched() -> None:
    tools = [tool("calc", "<<", "=")]
    too_long = "<<" + "1" * (MAX_ARGUMENT_CHARS + 1)
    for step in (1, 7, 3000, 20_000):
        text = too_long + "<<2="
        tokens = [text[i : i + step] for i in range(0, len(text), step)]
        assert names_of(calls_of(tools, tokens)) == [("calc", "2")], step


def test_an_argument_of_the_greatest_length_is_one_however_it_is_divided() -> None:
    tools = [tool("calc", "<<", "=")]
    for length, number in ((MAX_ARGUMENT_CHARS, 1), (MAX_ARGUMENT_CHARS + 1, 0)):
        text = "<<" + "1" * length + "="
        for step in (1, 5, 4096, len(text)):
            tokens = [text[i : i + step] for i in range(0, len(text), step)]
            assert len(calls_of(tools, tokens)) == number, (length, step)


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    assert calls_of([tool("calc", "<<", "=")], ["<"] + ["a" * 50] * 20_000) == []
    assert calls_of([tool("calc", "<<", "=")], ["<"] * 30_000) == []


@given(TOOLS, st.lists(st.text(ALPHABET, max_size=4), max_size=12))
@example([("ab", "=")], ["a", "ab", "="])
@example([("a", "b"), ("aa", "b")], ["a", "b"])
def test_any_division_into_tokens_gives_the_first_call(marks: list[tuple[str, str]], tokens: list[str]) -> None:
    """The call is the one that is found with the whole text at hand, and its span covers exactly its characters' tokens.

    A start that could still become a longer one is waited for, so the last token may come later, and a call at the very
    end of the text may not be certain yet.
    """
    tools = [
        tool(f"t{index}", start, stop) for index, (start, stop) in enumerate(marks) if start not in dict(marks[:index])
    ]
    text = "".join(tokens)
    calls = calls_of(tools, tokens)
    longest = max(len(start) for start, _ in marks)
    expected = first_call(tools, text)
    if not calls:
        assert expected is None or expected[3] > len(text) - longest
        return
    assert expected is not None
    name, arguments, first, end = expected
    owners = [index for index, token in enumerate(tokens) for _ in token]
    assert (calls[0].name, calls[0].arguments, calls[0].span[0]) == (name, arguments, owners[first])
    assert owners[end - 1] < calls[0].span[1] <= owners[min(end - 1 + longest, len(text) - 1)] + 1


def test_a_scripted_detector_calls_at_places_counted_in_generated_tokens() -> None:
    script = {2: [Call("a", "x"), Call("b", "y")], 4: [Call("c", "")]}
    detector = ScriptedDetector(script)
    for watch in (detector.watch(), detector.watch()):
        calls = [watch.feed(index, 7, "") for index in (0, 1, 12, 13, 14)]  # ten tokens were returned after the second
        assert calls == [(), (Call("a", "x", (1, 2)), Call("b", "y", (1, 2))), (), (Call("c", "", (13, 14)),), ()]
