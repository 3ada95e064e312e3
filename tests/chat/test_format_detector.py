"""The calls of a turn come together when it ends, and the engine pauses there instead of finishing."""

from jinfercept.calls import Call
from jinfercept.chat.detector import FormatDetector
from jinfercept.chat.parsers.formats import FORMATS

EOS = 7
TURN = [
    'Wait.<tool_call>{"name":',
    ' "f", "arguments": {',
    '"a": 1}}</tool_call>',
    '<tool_call>{"name": "g"}',
    "</tool_call>",
]


def calls_of(tokens: list[tuple[int, str]], format: str = "hermes") -> list[tuple[Call, ...]]:
    """What a watch says to each of these tokens and texts."""
    watch = FormatDetector(FORMATS[format], [EOS]).watch()
    return [watch.feed(index, token, text) for index, (token, text) in enumerate(tokens)]


def test_the_calls_of_a_turn_are_found_together_at_its_end_and_know_their_tokens() -> None:
    *before, calls = calls_of([*((0, text) for text in TURN), (EOS, "<|im_end|>")])
    assert before == [()] * len(TURN)
    assert [(call.name, call.arguments, call.span) for call in calls] == [
        ("f", '{"a": 1}', (0, 3)),
        ("g", "{}", (3, 4)),
    ]
    assert len({call.id for call in calls}) == 2


def test_spans_count_tokens_that_have_no_text_of_their_own() -> None:
    texts = ["", "<tool_call>", "", '{"name": "é', '", ', "", '"arguments": {}', "}", "", "</tool_call>"]
    *_, calls = calls_of([*((0, text) for text in texts), (EOS, "")])
    assert [call.span for call in calls] == [(3, 8)]


def test_every_turn_is_read_for_itself() -> None:
    turn = [*((0, text) for text in TURN), (EOS, "")]
    by_token = calls_of([*turn, (0, '{"name": "x", "arguments": {}}'), (EOS, ""), *turn, (EOS, "")])
    assert [[call.name for call in calls] for calls in by_token if calls] == [["f", "g"], ["f", "g"]]
    assert by_token[-2][0].span == (len(turn) + 2, len(turn) + 5)


def test_a_call_that_the_turn_ends_within_is_none() -> None:
    assert calls_of([(0, '<tool_call>{"name": "f", "arguments": {"a": '), (EOS, "")]) == [(), ()]
    assert calls_of([(0, '<tool_call>{"name": "f", "arguments": {"a": 1}'), (EOS, "")])[1][0].arguments == '{"a": 1}'


# -- in the engine -----------------------------------------------------------------------------------------------------
