"""Asynchronous calls: where results land at every step of their arrival, and what happens to them in every case."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.chat.call_markup import ContextMarkup
from jinfercept.chat.parsers.cml import Delimiters
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.events import Called, Event, Finished, Intercepted, Interrupted, Resumed, Token
from jinfercept.hooks import SharedLimit, TrapFrame
from jinfercept.outputs import CompletionOutput
from tests.support.async_streams import (
    Returns,
    ascii_tokenizer,
    async_engine,
    async_request,
    expected_stream,
    make_markup,
)
from tests.support.engine_requests import DEPTHS, until
from tests.support.fake_engine import POLICIES, run_all

STREAM = "a[CALL]1[HEAD]f(1)[END] b [CALL] 2 [HEAD]g()[END][c <think>[TRAP][END]</think>[TRAP] [END] d"
SPELLINGS = pytest.mark.parametrize("special", [False, True], ids=["text", "special"])


def check_arrival(special: bool, depth: int, arrival: int, later: int, lengths: tuple[int, int]) -> None:
    """Two results, the second so many generated tokens later, are where they must be."""
    tokenizer, markup = ascii_tokenizer(special), make_markup(special)
    script = tokenizer.encode(STREAM)
    returns = {"1": Returns(arrival, "x" * lengths[0]), "2": Returns(arrival + later, "y" * lengths[1])}
    engine, _ = async_engine(POLICIES["preserve"](), special, returns, num_pages=80, depth=depth)
    output = run_all(engine, [async_request(markup, script)])["a"].outputs[0]
    assert output.token_ids == expected_stream(markup, tokenizer, script, 3, returns, depth), (arrival, later)
    assert sorted(interrupt.call.id for interrupt in output.interrupts) == ["1", "2"]
    assert (output.num_generated, output.cancelled) == (len(script) + 3, ())


@SPELLINGS
@DEPTHS
def test_a_result_lands_at_the_first_clean_place_whenever_it_arrives(special: bool, depth: int) -> None:
    for arrival in range(len(ascii_tokenizer(special).encode(STREAM)) + 2):
        check_arrival(special, depth, arrival, (0, 1, 7)[arrival % 3], (1 + 7 * arrival % 40, 1))


def log_of(stream: str, returns: dict[str, Returns] | None = None, depth: int = 0, **options: Any) -> list[str]:
    """The events of a scripted stream in short, without tokens."""
    tokenizer, markup = ascii_tokenizer(True), make_markup(True, **options.pop("markup", {}))
    engine, dispatcher = async_engine(POLICIES["preserve"](), True, returns or {}, num_pages=900, depth=depth)
    engine.submit(async_request(markup, tokenizer.encode(stream), free=0, **options))
    events = until(engine, lambda: not engine.has_work, most_steps=3000)
    return [line for event in events if (line := short(event))] + dispatcher.log


def short(event: Event) -> str:
    match event:
        case Called():
            return f"called {event.call.id}"
        case Interrupted():
            return "interrupted " + " ".join(f"{i.call.id}={i.result.text}" for i in event.interrupts)
        case Intercepted():
            return "waits " + " ".join(call.id for call in event.calls)
        case Resumed():
            return "resumed " + " ".join(result.text for result in event.results)
        case Finished():
            output = event.output.outputs[0]
            return " ".join([output.finish_reason, *(f"cancelled {call.id}" for call in output.cancelled)])
        case _:
            return ""


ONE, TWO, TRAP = "[CALL]1[HEAD]f(1)[END]", "[CALL]2[HEAD]g(n=2)[END]", "[TRAP][END]"
NEVER = Returns(10_000, "late")
STARTED = ("start 1", "start 2")


@DEPTHS
@pytest.mark.parametrize(
    ("stream", "returns", "log"),
    [
        (f"{TRAP} a", {}, ["length"]),
        (
            f"{ONE} abcdef {TRAP} b",
            {"1": Returns(14, "x")},
            ["called 1", "interrupted 1=x", "length", "start 1", "return 1"],
        ),
        (
            f"{ONE} a {TWO}{TRAP} b",
            {"1": NEVER, "2": NEVER},
            ["called 1", "called 2", "waits 1 2", "resumed late late", "length", *STARTED, "return 1", "return 2"],
        ),
        (
            f"{ONE}<end>b",
            {"1": NEVER},
            ["called 1", "waits 1", "resumed late", "length", "start 1", "return 1"],
        ),
        (f"{ONE}<end>", {"1": NEVER}, ["called 1", "stop cancelled 1", "start 1", "cancel 1"]),
        (f"{ONE} a", {}, ["called 1", "length cancelled 1", "start 1", "cancel 1"]),
        ("[CALL]1[HEAD]f(<end>", {}, ["stop cancelled 1"]),
        ("[CALL]1[HEAD]f(", {}, ["length cancelled 1"]),
        (
            f"{ONE}[CALL]2[HEAD]f(<end>b",
            {"1": NEVER},
            [
                "called 1",
                "interrupted 2=error: no [END] before the end of the text",
                *("waits 1", "resumed late", "length", "start 1", "return 1"),
            ],
        ),
    ],
    ids=[
        *("no-op", "before", "during", "at the end", "no token left", "limit"),
        *("half a call", "half a call at the limit", "half a call and another"),
    ],
)
def test_the_events_of_a_trap(stream: str, returns: dict[str, Returns], log: list[str], depth: int) -> None:
    assert log_of(stream, returns, depth) == log


@DEPTHS
def test_a_mistake_is_answered_at_once(depth: int) -> None:
    for code, problem in (
        ("[CALL][HEAD]f(1)[END]", "=error: no id between [CALL] and [HEAD]"),
        ("[CALL]1[HEAD]h(1)[END]", "1=error: no tool 'h' (there are: f, g)"),
        ("[CALL]1[HEAD]f(1, 2)[END]", "1=error: 'f(1, 2)' is no call of a tool with literal arguments: more "),
        ("[INTR]1[HEAD]5[END]", "=error: only the runtime writes [INTR]"),
    ):
        log = log_of(f"a {code} b", depth=depth)
        assert len(log) == 2
        assert log[0].startswith(f"interrupted {problem}")
    twice = log_of(f"{ONE}{ONE}{TRAP} b", {"1": NEVER}, depth)
    assert twice[:3] == ["called 1", "interrupted 1=error: the id '1' belongs to an earlier call", "waits 1"]


@DEPTHS
def test_calls_beyond_the_limit_are_refused(depth: int) -> None:
    calls = "".join(f"[CALL]{number}[HEAD]f({number})[END]" for number in range(101))
    names = [str(number) for number in range(101)]
    log = log_of(f"{calls}{TRAP} b", dict.fromkeys(names, NEVER), depth, markup={"max_pending": 100})
    refused = "interrupted 100=error: 100 calls are pending, wait for them first"
    assert log[:102] == [*(f"called {name}" for name in names[:100]), refused, "waits " + " ".join(names[:100])]
    assert log[102] == "resumed" + " late" * 100
    assert log[103] == "length"
    assert log[-100:] == [f"return {name}" for name in names[:100]]


def test_several_requests_have_a_limit_of_pending_calls_together() -> None:
    limit = SharedLimit(2)
    markup, tokenizer = make_markup(True, shared_limit=limit), ascii_tokenizer(True)
    engine, dispatcher = async_engine(POLICIES["preserve"](), True, dict.fromkeys("1234", NEVER), num_pages=90)

    def call(ids: str) -> None:
        script = tokenizer.encode("".join(f"[CALL]{name}[HEAD]f(1)[END]" for name in ids) + "b" * 40 + TRAP)
        engine.submit(async_request(markup, script, name=ids))

    call("1")
    until(engine, lambda: len(dispatcher.started) == 1)
    call("23")
    events = until(engine, lambda: not engine.has_work)
    call("4")
    engine.step()
    engine.abort("4")
    events += until(engine, lambda: not engine.has_work)
    log = [line for event in events if (line := short(event))]
    assert "interrupted 3=error: too many calls of other requests are pending, call again later" in log
    assert limit.number == 0


@settings(max_examples=25)
@given(
    pieces=st.lists(
        st.sampled_from(
            [*Delimiters(), *(f"[CALL]{i}[HEAD]f({i})[END]" for i in range(4)), TRAP, "a", "<think>", " x"]
        ),
        min_size=1,
        max_size=14,
    ),
    delays=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    policy=st.sampled_from([*POLICIES]),
    depth=st.sampled_from([0, 1]),
    special=st.booleans(),
    pages=st.integers(60, 80),
)
def test_no_call_is_lost_and_none_is_answered_twice(
    pieces: list[str], delays: list[int], policy: str, depth: int, special: bool, pages: int
) -> None:
    markup, tokenizer = make_markup(special), ascii_tokenizer(special)
    returns = {str(i): Returns(delay, "r" * delay) for i, delay in enumerate(delays)}
    engine, dispatcher = async_engine(
        POLICIES[policy](), special, returns, 3, num_pages=pages, num_host_pages=20, depth=depth
    )
    engine.submit(async_request(markup, tokenizer.encode("".join(pieces))[:80]))
    engine.submit(async_request(make_markup(special), tokenizer.encode("b" * 60), name="other"))
    events = until(engine, lambda: not engine.has_work)
    called = [event.call.id for event in events if isinstance(event, Called)]
    output = next(e.output.outputs[0] for e in events if isinstance(e, Finished) and e.request_id == "a")
    read = [interrupt.call.id for interrupt in output.interrupts if interrupt.call.name]
    assert sorted([*read, *(call.id for call in output.cancelled if call.name)]) == sorted(called)
    answered = [interrupt.call.span for interrupt in output.interrupts] + [call.span for call in output.cancelled]
    assert sorted(answered) == frames_begun(markup, tokenizer, output)
    assert [line for line in dispatcher.log if line.startswith("start")] == [f"start {name}" for name in called]
    spans = [interrupt.span for interrupt in output.interrupts]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    streamed = [token for e in events if e.request_id == "a" for token in tokens_of(e)]
    assert streamed == output.token_ids
    occupancy = engine.scheduler.kv.occupancy()
    assert (occupancy.used, occupancy.paused) == (0, 0)


def frames_begun(markup: ContextMarkup, tokenizer: Tokenizer, output: CompletionOutput) -> list[tuple[int, int]]:
    """The spans of all frames that a request began, but those of traps, read again from what it generated."""
    watch, spans = markup.watch("", ()), list[tuple[int, int]]()
    read = {index for interrupt in output.interrupts for index in range(*interrupt.span)}
    for index, token in enumerate(output.token_ids):
        if index not in read:
            frames = watch.feed(index, token, tokenizer.token_text(token))
            spans += [frame.span for frame in frames if not isinstance(frame, TrapFrame)]
            spans += [frame.span for frame in (watch.end() if token in tokenizer.eos_token_ids else ())]
    return sorted([*spans, *(frame.span for frame in watch.end())])


def tokens_of(event: Event) -> tuple[int, ...]:
    if isinstance(event, Token):
        return (event.token_id,)
    return event.token_ids if isinstance(event, Interrupted | Resumed) else ()
