"""A start compiles what a first request needs, the rest behind requests, and shows one line at a time."""

import io
import logging
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept import LLM, SamplingParams
from jinfercept.runner import executables
from jinfercept.runner.pools import Pool
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.start.memory import FreeMemory
from jinfercept.start.progress import StartDisplay
from tests.support.pretend import quiet_after
from tests.support.tiny_model import GOLDEN

FLAGS = {"dtype": "float32", "kv_tokens": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHORT = [{"prompt_token_ids": list(range(first, first + 30))} for first in (4, 44)]
LONG = {"prompt_token_ids": list(range(4, 90))}
KINDS = [
    PARAMS,
    replace(PARAMS, temperature=1.0, seed=1),
    replace(PARAMS, temperature=1.0, seed=1, top_k=3, logprobs=2),
    replace(PARAMS, repetition_penalty=1.2, logit_bias={7: 2.0}),
    replace(PARAMS, allowed_token_ids=[5, 6, 7], min_tokens=3),
    replace(PARAMS, prompt_logprobs=1),
]


def test_no_first_request_waits_for_an_executable(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_after(monkeypatch, 1e9)  # since no call yet, too
    caplog.set_level("INFO", "jinfercept")
    flags = {**FLAGS, "max_num_seqs": 9, "max_num_batched_tokens": 64, "kv_tokens": 384}  # so that a chunk is measured
    obtain, waited_for = executables.Executables._obtain_for_call, list[Hashable]()
    monkeypatch.setattr(
        executables.Executables, "_obtain_for_call", lambda run, key: waited_for.append(key) or obtain(run, key)
    )

    def kinds_of_tokens(llm: LLM) -> list[object]:
        """Of one request alone, of as many as run at once, and of more than the pool holds."""
        outputs = [llm.generate([LONG], params)[0] for params in KINDS]
        outputs += llm.generate([SHORT[0]] * 9, replace(PARAMS, temperature=1.0, seed=1))
        outputs += llm.generate([{"prompt_token_ids": list(range(first, first + 90))} for first in range(9)], PARAMS)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(GOLDEN / "llama_gqa", lazy=False, profile=PROFILES["paper-gptj-6b-a100"], **flags) as llm:
        expected = kinds_of_tokens(llm)
    for how in ("measured", "remembered"):
        with LLM(GOLDEN / "llama_gqa", policy="swap", **flags) as llm:
            assert not waited_for, "a measured step has one compiled"
            assert (llm.start_times.profile, llm.start_times.num_pending > 5) == (how, True)
            assert kinds_of_tokens(llm) == expected
        assert f"{llm.start_times.num_pending} executables are compiled behind the first requests" in caplog.text
        assert not waited_for
        caplog.clear()


def test_products_are_tuned_before_the_pool_has_the_memory_and_nothing_is_tuned_behind_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet_after(monkeypatch, 1e9)
    monkeypatch.setattr(FreeMemory, "on", lambda *_: FreeMemory(1 << 32, shared=False))  # as a GPU has
    events, options, allocate = list[Any](), executables._options, Pool.come_back
    monkeypatch.setattr(executables, "_options", lambda *, tuned: events.append(tuned) or options(tuned=tuned))
    monkeypatch.setattr(Pool, "come_back", lambda pool: events.append("pool") or allocate(pool))
    with LLM(GOLDEN / "llama_gqa", profile=PROFILES["paper-gptj-6b-a100"], **FLAGS) as llm:
        assert llm.memory_plan.timed_bytes > 0
        run = llm.engine.setup.runner.executables
        pending = run.pending
        assert pending
        with_products = {"embed", "layers", "decode embed", "decode layers", "head"}
        assert with_products.isdisjoint(key[0] for key in pending if isinstance(key, tuple))
        for key in pending:
            run[key]
    before, after = events[: events.index("pool")], events[events.index("pool") :]
    assert before == [True] * len(before)
    assert after == ["pool", *[False] * len(pending)]


SCRIPT = """
from jinfercept.start.progress import StartDisplay
with StartDisplay() as progress:
    for done in range(3):
        progress("loading", done, 2)
    progress("compiling", 0, 9)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_script_without_a_terminal_writes_a_line_for_each_phase() -> None:
    shown = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert shown.stderr.splitlines() == ["start: loading, 0 of 2", "start: compiling, 0 of 9"]
    assert shown.stdout == ""


def test_a_program_that_logs_gets_records_and_no_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logging.getLogger("jinfercept").handlers)
    with caplog.at_level("INFO", "jinfercept"), StartDisplay() as progress:
        assert logging.getLogger("jinfercept").handlers == handlers
        progress("compiling", 3, 9)
    assert caplog.messages == ["start: compiling, 3 of 9"]


def test_a_terminal_shows_one_phase_at_a_time_and_nothing_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with StartDisplay() as progress:
        for what in ("loading", "compiling"):
            progress(what, 0, 2)
            progress(what, 1, 2)
    last = terminal.getvalue().split("\x1b[2K")[-2]
    assert ("compiling" in last, "loading" in last) == (True, False)
