"""How an LLM with requests ends: closed while they run, dropped, or left by a script that ends."""

import asyncio
import gc
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept import LLM, EngineError, RequestError, SamplingParams
from jinfercept.engine.thread import EngineThread
from jinfercept.events import Event, Finished
from jinfercept.request import Request
from tests.support.engine_state import engine_of, engine_state
from tests.support.fake_engine import POLICIES, make_engine
from tests.support.gate import Gate
from tests.support.tiny_model import tiny_llm, tiny_setup
from tests.support.tool_runner import until

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def prompt(number: int) -> dict[str, Any]:
    return {"prompt_token_ids": [number + 1, 2, 3]}


def test_closing_is_an_error_of_every_caller_that_still_waits() -> None:
    with tiny_llm(kv_tokens=512, max_model_len=128) as llm, ThreadPoolExecutor() as threads:
        Gate(llm.engine.thread, engine_of(llm), after=4)
        streams = [llm.stream(prompt(i), LONG) for i in range(3)]
        next(streams[0])
        [finished] = llm.generate(prompt(5), SamplingParams(max_tokens=1))
        both = [replace(LONG, max_tokens=1), LONG]
        waiting = [threads.submit(llm.generate, [prompt(6), prompt(7)], both)]
        until(lambda: engine_state(llm).num_unfinished == 4)  # the first of the two has ended
        waiting.append(threads.submit(lambda: asyncio.run(llm.agenerate([prompt(8), prompt(9)], both))))
        until(lambda: engine_state(llm).num_unfinished == 5)
        llm.close()
        for failure in (future.exception(60) for future in waiting):
            assert isinstance(failure, EngineError)
            assert "the LLM was closed; 1 of 2 requests are lost; fix: make a new LLM" in str(failure)
            assert [output and output.outputs[0].finish_reason for output in failure.outputs] == ["length", None]
    assert finished.outputs[0].finish_reason == "length"
    for stream in streams:
        events: list[Event] = []
        with pytest.raises(EngineError, match="the LLM was closed"):
            events.extend(stream)
        assert isinstance(events[-1], Finished)
        assert events[-1].output.outputs[0].finish_reason == "error"
    with pytest.raises(RequestError, match="closed"):
        llm.stream(prompt(1), PARAMS)


def test_an_llm_that_is_dropped_is_collected_when_its_thread_has_ended() -> None:
    gc.freeze()  # what is there already takes a collection a second
    setup = tiny_setup(kv_tokens=128, max_model_len=64)
    llm, runner = LLM(setup), weakref.ref(setup.runner)  # which the engine holds
    llm.generate(prompt(1), PARAMS)
    del llm, setup
    until(lambda: gc.collect() >= 0 and runner() is None)


def test_a_process_without_threads_refuses_a_request_and_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = EngineThread(make_engine(POLICIES["copy_ahead"](), num_pages=20))
    events: queue.Queue[Any] = queue.Queue()
    params = SamplingParams(temperature=0.0, max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(EngineError, match="can't start new thread"):
            thread.submit([Request("refused", (1, 2), params)], events.put)
    thread.submit([Request("served", (1, 2), params)], events.put)
    while not isinstance(event := events.get(timeout=10)[-1], Finished):
        pass
    assert (event.request_id, event.output.outputs[0].finish_reason) == ("served", "length")
    thread.close()


ROOT = Path(__file__).parents[2]
BEGIN = """
import asyncio, atexit, os, signal, sys, threading, time
from dataclasses import replace
from jinfercept import LLM, SamplingParams, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.models.load import read_config
from jinfercept.calls import Call
from tests.support.tiny_model import GOLDEN

LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3]}
CONFIG = replace(read_config(GOLDEN / "llama_gqa"), max_position=4096)
SIZES = {"kv_tokens": 6144, "max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 4, "page_size": 16}


def make(**options):
    options = {"lazy": True} | SIZES | options
    return LLM(CONFIG, load_format="dummy", dtype="float32", profile="paper-gptj-6b-a100", layers_per_step=4, **options)


def begin(llm, **options):
    stream = llm.stream(PROMPT, LONG, **options)
    next(stream)
    return stream


"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    code = BEGIN + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_script_that_ends_with_requests_in_flight_has_its_own_exit_code() -> None:
    ended = run("""
        async def read():
            async for _ in llm.astream(PROMPT, LONG):
                break

        sleeping = threading.Event()
        tool = Tool(lambda argument: (sleeping.set(), time.sleep(600)), name="sleeps")
        detector = ScriptedDetector({2: [Call("sleeps", "")]})
        llm = make()
        streams = [begin(llm), begin(llm, tools=[tool], detector=detector)]
        asyncio.run(read())
        sleeping.wait()
        if os.fork() == 0:
            streams[0]._thread._close_at_exit()  # does not wait: this child has not the thread
            os._exit(0)
        os.wait()
        threading.Thread(target=make, kwargs={"lazy": False}, daemon=True).start()
        streams += [begin(llm), streams]
        del llm  # its streams alone are left, in a cycle
        sys.exit(5)
    """)
    assert ended.returncode == 5, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("for _ in begin(make()): raise RuntimeError('mine')", 1, "RuntimeError: mine"),
        ("llm = make(); stream = begin(llm); sys.exit(5)", 5, ""),
        ("stream = begin(make()); raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("stream = begin(make()); signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_an_exception_or_a_signal_ends_the_script_as_it_would_without_an_llm(
    script: str, code: int, words: str
) -> None:
    ended = run(script)
    assert ended.returncode == code
    assert words in ended.stderr
    assert bool(words) == ("Traceback" in ended.stderr or "Exception" in ended.stderr)
