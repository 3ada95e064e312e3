"""Streams in threads: what they yield, and that a client that leaves leaves nothing behind."""

import gc
import logging
import signal
import threading

import pytest

from jinfercept import LLM, EngineError, RequestError, SamplingParams, ScriptedDetector, Tool
from jinfercept.calls import Call
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Finished, Intercepted, Resumed, Token
from jinfercept.request import Request
from jinfercept.runner.runner import ModelRunner
from tests.support.chat_templates import QWEN
from tests.support.engine_state import LONG, PARAMS, engine_state, prompt, settle, tokens_of
from tests.support.gate import closed_gate
from tests.support.pretend import failing_steps
from tests.support.scripted_model import Make

CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
READ = "<|im_end|>\n<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "How much is a lamp?"}]


def price(item: str) -> str:
    """The price of an item."""
    return "23"


# -- in a thread -------------------------------------------------------------------------------------------------------


def test_a_chat_streams_what_a_person_sees_and_calls_as_they_are_written(make_scripted: Make) -> None:
    scripted = make_scripted(QWEN)
    params = SamplingParams(temperature=0.0, max_tokens=300)
    [bare] = scripted.llm.chat(MESSAGES, SamplingParams(max_tokens=1), tools=[price])
    scripted.follow(f"{bare.prompt}Well.\n{CALL}{READ}It is 23.<|im_end|>")
    events = list(scripted.llm.stream(MESSAGES, params, tools=[price]))
    seen = [event for event in events if not isinstance(event, Token)]
    kinds = [type(event) for event in seen]
    assert kinds.index(CallStarted) < kinds.index(CallEnded) < kinds.index(Intercepted) < kinds.index(Resumed)
    assert "".join(event.text for event in seen if isinstance(event, Content)) == "Well.It is 23."
    assert "".join(event.text for event in seen if isinstance(event, Arguments)) == '{"item": "lamp"}'
    assert sum(kind is Arguments for kind in kinds) > 3
    [started] = [event for event in seen if isinstance(event, CallStarted)]
    [paused] = [event for event in seen if isinstance(event, Intercepted)]
    assert started.id == paused.calls[0].id
    assert isinstance(seen[-1], Finished)
    roles = [message["role"] for message in seen[-1].output.outputs[0].messages]
    assert roles == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("how", ["closed", "dropped", "left"])
def test_an_abandoned_stream_gives_its_request_up(gated: LLM, how: str) -> None:
    llm = gated
    gc.freeze()  # what is there already takes a collection a second

    def take_two() -> None:
        for number, _ in enumerate(llm.stream(prompt(1), LONG)):
            if number == 1:
                return

    if how == "left":
        take_two()
    else:
        stream = llm.stream(prompt(1), LONG)
        next(stream)
        if how == "closed":
            stream.close()
            assert not engine_state(llm).num_unfinished
            assert list(stream) == []
        del stream
    gc.collect()
    settle(llm)


def test_a_stream_that_nobody_reads_is_given_up_while_its_tool_runs(llm: LLM) -> None:
    begun, over = threading.Event(), threading.Event()

    def slow(argument: str) -> str:
        begun.set()
        over.wait(60)
        return ""

    tool = Tool(slow, name="slow")
    with llm.stream(prompt(1), LONG, tools=[tool], detector=ScriptedDetector({2: [Call("slow", "")]})):
        assert begun.wait(60)
    settle(llm)
    over.set()


def test_an_interrupt_gives_up_what_it_interrupts_and_nothing_else(llm: LLM, interruptible: None) -> None:
    over = threading.Event()
    [expected] = llm.generate(prompt(1), LONG)
    stream = llm.stream(prompt(1), LONG)
    next(stream)
    forever = ScriptedDetector({2: [Call("slow", "")]})

    def interrupt(argument: str) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        over.wait(60)

    slow = Tool(interrupt, name="slow")
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt(2), LONG, tools=[slow], detector=forever)
    over.set()
    events = list(stream)
    assert isinstance(events[-1], Finished)
    assert events[-1].output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_interrupt_with_the_last_event_loses_no_end(llm: LLM, interruptible: None) -> None:
    def interrupt(argument: str) -> list[int]:
        signal.raise_signal(signal.SIGINT)  # not in the main thread: noticed there when the end arrives
        return [5]

    tool, detector = Tool(interrupt, name="tool"), ScriptedDetector({11: [Call("tool", "")]})
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt(2), PARAMS, tools=[tool], detector=detector)


def test_a_tool_may_use_its_own_llm(llm: LLM) -> None:
    def ask(argument: str) -> list[int]:
        [inner] = llm.generate(prompt(2), PARAMS)
        return inner.outputs[0].token_ids

    [expected] = llm.generate(prompt(2), PARAMS)
    detector = ScriptedDetector({2: [Call("ask", "")]})
    [output] = llm.generate(prompt(1), PARAMS, tools=[Tool(ask, name="ask")], detector=detector)
    [pause] = output.interceptions
    assert output.outputs[0].token_ids[slice(*pause.span)] == expected.outputs[0].token_ids


def test_a_detector_that_uses_its_own_llm_is_told_so(llm: LLM) -> None:
    class Asks:
        def watch(self) -> "Asks":
            return self

        def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
            llm.generate(prompt(2), PARAMS)
            return ()

    [output] = llm.generate(prompt(1), PARAMS, detector=Asks())
    assert output.outputs[0].finish_reason == "error"
    assert "engine's own thread" in str(output.outputs[0].stop_reason)


def test_an_engine_with_requests_does_not_start_over(llm: LLM) -> None:
    with closed_gate(llm, after=4) as gate, llm.stream(prompt(1), LONG) as stream:
        next(stream)
        with pytest.raises(RequestError, match="only an idle LLM"):
            llm.restart()
        gate.open()
        assert len(tokens_of(list(stream))) == 99
    llm.restart()


def test_refused_requests_leave_nothing_behind(llm: LLM) -> None:
    for bad in ({"prompt_token_ids": []}, {"prompt_token_ids": [1 << 30]}, 3, [{"role": "user"}]):
        with pytest.raises(ValueError, match="fix: "):
            llm.stream(bad, PARAMS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="no event loop"):
        llm.astream(prompt(1), PARAMS)
    with pytest.raises(RequestError, match="chat options need messages"):
        llm.stream(prompt(1), PARAMS, max_rounds=1)
    assert not engine_state(llm).has_work


# -- when the engine fails ---------------------------------------------------------------------------------------------


def test_an_engine_whose_thread_cannot_go_on_says_so_until_it_is_restarted(llm: LLM) -> None:
    [expected] = llm.generate(prompt(1), PARAMS)

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit("the log is full")

    handler = Full()
    logging.getLogger("jinfercept").addHandler(handler)
    try:
        with failing_steps(), pytest.raises(EngineError, match="the engine failed"):
            llm.generate(prompt(1), PARAMS)
        for _ in range(2):
            with pytest.raises(EngineError, match="restart"):
                llm.generate(prompt(1), PARAMS)
    finally:
        logging.getLogger("jinfercept").removeHandler(handler)
    llm.restart()
    [output] = llm.generate(prompt(1), PARAMS)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_sink_that_fails_while_the_log_fails_ends_its_own_requests_only(llm: LLM) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the log is full")

    def closed(news: object) -> None:
        raise RuntimeError("the loop is closed")

    handler = Full()
    logging.getLogger("jinfercept").addHandler(handler)
    try:
        llm.engine.thread.submit([Request("left", (1, 2, 3), LONG)], closed)
        [output] = llm.generate(prompt(1), PARAMS)
    finally:
        logging.getLogger("jinfercept").removeHandler(handler)
    assert output.outputs[0].finish_reason == "length"
    settle(llm)


# -- when another engine begins ----------------------------------------------------------------------------------------


def test_an_interrupt_waits_until_a_restart_is_done(
    llm: LLM, interruptible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = llm.generate(prompt(1), PARAMS)
    reset = ModelRunner.reset

    def interrupted(runner: ModelRunner) -> None:
        signal.raise_signal(signal.SIGINT)
        reset(runner)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.restart()
    [output] = llm.generate(prompt(1), PARAMS)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
