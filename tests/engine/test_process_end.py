"""A script may end with requests in flight: its exit code is its own, and no thread is left in JAX."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import asyncio, atexit, os, signal, sys, threading, time
from dataclasses import replace
from jinfercept import LLM, SamplingParams, Tool
from jinfercept.intercept.detector import ScriptedDetector
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
