"""How much Python a decode step of a streamed chat runs, from the engine's plan to the bytes on the socket."""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import jinfercept
from tests.support.engine_state import engine_of
from tests.support.live_server import Running, prompt_of
from tests.support.scripted_model import Scripted

PACKAGE = str(Path(jinfercept.__file__).parent)
MESSAGES = [{"role": "user", "content": "Count"}]
MOST_CALLS = 150
MOST_FILES = 60


def test_a_decode_step_of_a_streamed_chat_makes_few_calls_in_few_files(
    scripted: Scripted, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.follow(prompt_of(scripted, MESSAGES) + "one two three " * 30 + "<|im_end|>")
    monkeypatch.setattr(engine_of(served.llm), "_check", False)
    _called(served, 64)
    few, many = _called(served, 64), _called(served, 192)
    calls = {place: (count - few[place]) / 128 for place, count in many.items()}
    each = {place for place, per_step in calls.items() if per_step > 0.5}
    assert sum(calls.values()) <= MOST_CALLS, sorted(((n, *place) for place, n in calls.items()), reverse=True)[:40]
    assert len({file for file, _ in each}) <= MOST_FILES


def _called(served: Running, max_tokens: int) -> Counter[tuple[str, str]]:
    """Calls of the package's functions while a chat of so many tokens is streamed, by file and name."""
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    body = {"messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    threading.setprofile_all_threads(note)
    try:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            num_chunks = sum(line.startswith("data: ") for line in reply.iter_lines())
    finally:
        threading.setprofile_all_threads(None)
        sys.setprofile(None)
    assert num_chunks >= max_tokens
    served.wait_idle()
    return Counter(entered)
