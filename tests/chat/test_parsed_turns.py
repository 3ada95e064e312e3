"""The calls of a turn come together when it ends, and the engine pauses there instead of finishing."""

from typing import Any

import pytest

from jinfercept.calls import Call, Result, Tool
from jinfercept.chat.detector import ParsedTurn
from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.outputs import CompletionOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.policy import preserve
from tests.support.engine_requests import DEPTHS
from tests.support.fake_engine import InstantDispatcher, ManualClock, make_engine, run_all, uninterrupted

EOS = 7
RETURNED = (3, 4, 5)
TURN = [
    'Wait.<tool_call>{"name":',
    ' "f", "arguments": {',
    '"a": 1}}</tool_call>',
    '<tool_call>{"name": "g"}',
    "</tool_call>",
]
PROMPT = (1, 2)


class TurnDetector:
    """Finds the calls of a turn together, at the token that ends it."""

    def __init__(self, format: str, eos: int) -> None:
        self.format, self.eos = FORMATS[format], eos

    def watch(self) -> "TurnWatch":
        return TurnWatch(self)


class TurnWatch:
    def __init__(self, detector: TurnDetector) -> None:
        self.detector, self.turn = detector, ParsedTurn(detector.format.parser())

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        if token_id != self.detector.eos:
            self.turn.feed(index, len(text), text)
            return ()
        self.turn.finish()
        calls, self.turn = self.turn.spanning_tokens(), ParsedTurn(self.detector.format.parser())
        return calls


def calls_of(tokens: list[tuple[int, str]], format: str = "hermes") -> list[tuple[Call, ...]]:
    """What a watch says to each of these tokens and texts."""
    watch = TurnDetector(format, EOS).watch()
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


class Speech:
    """A text whose generated tokens say what is given, one after another, and then nothing."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = list(texts)
        self.last_raw, self.text = "", ""
        self.stopped: str | None = None
        self.hidden = frozenset[int]()
        self.half_character = False

    def add(self, token_id: int) -> str:
        self.last_raw = self.texts.pop(0) if self.texts else ""
        self.text += self.last_raw
        return self.last_raw

    def inject(self, token_ids: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return ""


def stream(number: int, script: dict[int, list[int]] | None = None) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=number)
    return uninterrupted(PROMPT, params, script or {}, 1000)


def serve(depth: int, texts: list[str], **params: Any) -> CompletionOutput:
    """A model that says these texts, token by token, whose end-of-text token is what it samples behind `TURN`."""
    eos = stream(len(TURN) + 1)[-1]
    assert eos not in stream(len(TURN))
    clock = ManualClock()
    engine = make_engine(
        preserve(),
        num_pages=40,
        depth=depth,
        clock=clock,
        dispatcher=InstantDispatcher(clock, lambda call: 0.01, lambda call: Result("", token_ids=RETURNED)),
        eos_token_ids=(eos,),
        open_text=lambda request: Speech(texts),
    )
    tools = {name: Tool(str, name=name) for name in "fg"}
    params = {"temperature": 0, "max_tokens": 12} | params
    single = Request("a", PROMPT, SamplingParams(**params), tools, TurnDetector("hermes", eos))
    return run_all(engine, [single])["a"].outputs[0]


@DEPTHS
def test_calls_pause_the_request_at_the_end_of_its_turn_all_at_once(depth: int) -> None:
    output = serve(depth, TURN)
    (pause,) = output.interceptions
    assert [(call.name, call.span) for call in pause.calls] == [("f", (0, 3)), ("g", (3, 4))]
    assert len(pause.results) == 2
    assert pause.span == (6, 12)
    assert output.token_ids == stream(12, {6: [*RETURNED, *RETURNED]})[: len(output.token_ids)]
    assert (output.finish_reason, output.num_generated) == ("length", 12)


@DEPTHS
def test_a_turn_without_calls_ends_the_request(depth: int) -> None:
    for texts in (["Bye."], [*TURN[:2]]):
        output = serve(depth, texts)
        assert (output.finish_reason, output.stop_reason, output.interceptions) == ("stop", None, ())
        assert output.token_ids == stream(len(TURN) + 1)


@DEPTHS
@pytest.mark.parametrize("max_tokens", [5, 6])
def test_a_turn_that_ends_where_nothing_more_may_be_generated_calls_nothing(depth: int, max_tokens: int) -> None:
    output = serve(depth, TURN, max_tokens=max_tokens)
    assert (output.finish_reason, output.interceptions) == ("length", ())
    assert output.token_ids == stream(max_tokens)


@DEPTHS
def test_a_token_at_which_the_user_wants_to_stop_calls_nothing(depth: int) -> None:
    eos = stream(len(TURN) + 1)[-1]
    output = serve(depth, TURN, stop_token_ids=[eos])
    assert (output.finish_reason, output.interceptions) == ("stop", ())


@DEPTHS
def test_calls_pause_a_request_that_ignores_the_end_of_its_text(depth: int) -> None:
    output = serve(depth, TURN, ignore_eos=True)
    assert len(output.interceptions) == 1
    assert output.finish_reason == "length"
