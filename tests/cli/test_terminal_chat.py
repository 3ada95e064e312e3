"""The chat at a terminal, on a model that writes what a script says, and `jinfercept run` with a pipe."""

import io
import json
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jinfercept.cli.main import main
from jinfercept.cli.terminal_chat import TerminalChat
from jinfercept.errors import RequestError
from jinfercept.sampling_params import SamplingParams
from jinfercept.tools.load import load_tools
from jinfercept.tools.python_process import load_functions
from tests.support.chat_templates import PLAIN, QWEN, QWEN3
from tests.support.engine_state import engine_state
from tests.support.pretend import failing_steps
from tests.support.scripted_model import Make, Scripted

GREEDY = SamplingParams(temperature=0.0, max_tokens=300)
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
READ = "<|im_end|>\n<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
TOOLS = '''
import time as _time

def price(item: str) -> str:
    """The price of an item."""
    _time.sleep(0.01)
    return "23"

def undocumented(): ...

def _hidden():
    """Not for models."""
'''


def script(scripted: Scripted, question: str, written: str, tools: Any = ()) -> None:
    """The model answers a question that comes first in a conversation."""
    scripted.follow()
    messages = [{"role": "user", "content": question}]
    [output] = scripted.llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0), tools=tools)
    assert output.prompt is not None
    scripted.follow(output.prompt + written)


def test_an_engine_that_fails_ends_the_answer_and_not_the_chat(
    make_scripted: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = make_scripted(QWEN)
    script(scripted, "How much?", "It costs 23.<|im_end|>")
    chat = TerminalChat(scripted.llm, GREEDY)
    with failing_steps():
        chat.answer("How much?")
    assert "the engine failed: RuntimeError: " in capsys.readouterr().err
    assert chat.messages == []
    chat.answer("How much?")
    assert capsys.readouterr().out == "It costs 23.\n"


def typed(*lines: str) -> Callable[[], str | None]:
    left = iter(lines)
    return lambda: next(left, None)


def test_a_chat_shows_answers_calls_and_what_became_of_the_context(
    make_scripted: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    tools = load_functions(tmp_path / "tools.py")
    assert [tool.__name__ for tool in tools] == ["price"]
    scripted = make_scripted(QWEN)
    script(scripted, "How much?", f"Well.\n{CALL}{READ}It is 23.<|im_end|>", tools)
    chat = TerminalChat(scripted.llm, GREEDY, tools=tools)
    saved = tmp_path / "chat.json"
    chat.run(
        typed("", "How much?", f"/save {saved}", "/reset", "/nonsense", "/help", "/save /no/such/place", "/quit", "x")
    )
    shown, aside = capsys.readouterr()
    assert shown == "Well.\nIt is 23.\n"
    assert re.search(r'price\(item="lamp"\) → 23  \(\d+\.\d s\)', aside)
    assert "tokens/s" in aside
    assert "context over calls: " in aside
    assert "recomputed" in aside
    assert "the commands are /help, /reset, /save FILE, /quit" in aside
    assert "not saved" in aside
    roles = [message["role"] for message in json.loads(saved.read_text())]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert chat.messages == []


def test_reasoning_is_shown_beside_the_answer(make_scripted: Make, capsys: pytest.CaptureFixture[str]) -> None:
    scripted = make_scripted(QWEN3)
    script(scripted, "How much?", "<think>\nA [lamp]?\nOr two?\n</think>\n\nIt is 23.<|im_end|>")
    chat = TerminalChat(scripted.llm, GREEDY)
    chat.answer("How much?")
    shown, aside = capsys.readouterr()
    assert shown == "It is 23.\n"
    assert aside.startswith("A [lamp]?\nOr two?\n")
    assert chat.messages[-1]["reasoning_content"] == "A [lamp]?\nOr two?"


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(
    make_scripted: Make, capsys: pytest.CaptureFixture[str], interruptible: None
) -> None:
    scripted, never = make_scripted(QWEN), threading.Event()

    def price(item: str) -> str:
        """The price of an item."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        never.wait(60)
        return "23"

    script(scripted, "How much?", f"Let me see.\n{CALL}<|im_end|>", [price])
    chat = TerminalChat(scripted.llm, GREEDY, system=None, tools=[price])
    chat.answer("How much?")
    assert chat.messages == [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": "Let me see."},
    ]
    assert "stopped" in capsys.readouterr().err
    assert not engine_state(scripted.llm).num_unfinished
    never.set()
    chat.answer("Well?")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2


def test_an_answer_that_cannot_be_given_leaves_the_conversation_as_it_was(
    make_scripted: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = TerminalChat(make_scripted(PLAIN).llm, GREEDY, system="Be brief.")
    chat.answer("long " * 1000)
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    error_text = capsys.readouterr().err
    assert "leaves no room" in error_text
    assert "/reset" not in error_text
    chat.messages.append({"role": "user", "content": "long " * 1000})
    chat.answer("And now?")
    assert "/reset begins a new conversation" in capsys.readouterr().err


def test_what_a_model_writes_commands_no_terminal(make_scripted: Make, capsys: pytest.CaptureFixture[str]) -> None:
    scripted = make_scripted(PLAIN)
    script(scripted, "Clear!", "\x1b[2J\x07\n\tred\x9b1m<|im_end|>")
    TerminalChat(scripted.llm, GREEDY).answer("Clear!")
    assert capsys.readouterr().out == "␛[2J␇\n\tred\ufffd1m\n"


def test_a_call_for_a_person_is_answered_at_the_terminal(
    make_scripted: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "person"\nname = "price"\ndescription = "knows"\n')
    scripted = make_scripted(QWEN)
    with load_tools(tmp_path / "tools.toml") as loaded:
        call = CALL.replace("item", "question")
        script(scripted, "How much?", f"{call}{READ}It is 23.<|im_end|>", loaded.tools)
        chat = TerminalChat(scripted.llm, GREEDY, tools=loaded.tools, inbox=loaded.inbox)
        chat.run(typed("How much?", "23", "/reset", "How much?", ""))
    shown, aside = capsys.readouterr()
    assert shown.startswith("It is 23.\n")
    assert "price asks: lamp" in aside
    assert 'price(question="lamp") → 23' in aside
    assert "declined" in aside


def test_tools_that_the_model_cannot_call_are_refused_at_once(make_scripted: Make, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with pytest.raises(RequestError, match="the chat template uses no known format of tool calls"):
        TerminalChat(
            make_scripted(PLAIN + "{% if tools %}{% endif %}").llm, GREEDY, tools=load_functions(tmp_path / "tools.py")
        )


def test_a_file_without_tools_says_what_got_and_fix(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0")
    (tmp_path / "wrong.py").write_text("\n\ndef")
    for name, match in (
        ("empty.py", "defines no tool"),
        ("broken.py", "failed.*broken.py, line 2: ZeroDivisionError"),
        ("wrong.py", "failed.*wrong.py, line 3: SyntaxError"),
    ):
        with pytest.raises(RequestError, match=match):
            load_functions(tmp_path / name)


def test_run_chats_with_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n\n/quit\n"))
    flags = ["--kv-tokens", "256", "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-tokens", "12"]
    assert main(["run", "smollm2-135m", "--system", "Answer briefly.", "--top-k", "5", *flags]) == 0
    assert "France" in capsys.readouterr().out


def test_run_says_which_flags_belong_to_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2-135m", "--prompt", "x", "--system", "y"]) == 2
    assert "--system" in capsys.readouterr().err
