"""A chat at a terminal: answers as they are generated, running calls, the context use of an answer, and a few commands.

The answer goes to standard output and everything else to standard error, so a pipe gets only the answers.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from jinfercept.calls import Call
from jinfercept.engine.streaming import Stream
from jinfercept.errors import EngineError, RequestError
from jinfercept.events import Content, Intercepted, Reasoning, Resumed
from jinfercept.llm import LLM
from jinfercept.models.embedded import cache_directory
from jinfercept.outputs import RequestOutput
from jinfercept.sampling_params import SamplingParams
from jinfercept.tools.inbox import Inbox

_HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def harmless(text: str) -> str:
    """Replace control characters other than new lines and tabs by their pictures (`␛`), or by U+FFFD if they have none."""
    return text.translate(_HARMLESS)


COMMANDS = {
    "/help": "what may be typed",
    "/reset": "begin anew; the system message stays",
    "/save FILE": "write the conversation to a JSON file",
    "/quit": "leave (as Ctrl-D does); Ctrl-C stops an answer",
}
HISTORY_LINES = 1000
_SHOWN_CHARS = 70
_TIMEOUT_S = 1.0
_POLL_S = 0.02


@final
class TerminalChat:
    """One conversation. Raises `RequestError` or `ModelError` if the model cannot chat, or not with these tools."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        tools: Sequence[Any] = (),  # and options, as `LLM.chat` takes them
        inbox: Inbox | None = None,  # its calls are put to the person at the terminal
        **options: Any,
    ) -> None:
        self._inbox = inbox or Inbox()
        self._ask: Callable[[], str | None] = lambda: None
        self._llm, self._params, self._tools, self._options = llm, params, tools, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._column = 0  # whether the answer's last line is open
        self._thinks = False  # whether a line of reasoning is open
        self.messages: list[Any] = list(self._system)
        llm.chat((), params, tools=tools, **options)  # says now what cannot work

    def run(self, ask: Callable[[], str | None]) -> None:
        """Take lines until the input ends, or until `/quit`."""
        self._ask = ask
        while (line := ask()) is not None:
            line = line.strip()
            if line == "/quit":
                break
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            elif line:
                self.answer(line)

    def answer(self, text: str) -> None:
        """Answer a person's message. An interrupt stops the answer; the text so far stays in the conversation.

        If the engine fails there is no answer. The engine is started anew, and the question can be asked again.
        """
        question = {"role": "user", "content": text}
        try:
            stream = self._llm.stream([*self.messages, question], self._params, tools=self._tools, **self._options)
        except RequestError as error:
            history = len(self.messages) > len(self._system)
            self._note(f"jinfercept: {error}" + ("; /reset begins a new conversation" if history else ""))
            return
        except KeyboardInterrupt:
            self._note("stopped")
            return
        output: RequestOutput | None = None
        while output is None:
            try:
                output = self._follow(stream)
            except KeyboardInterrupt:
                stream.abort()
            except EngineError as error:
                self._end_line()
                self._llm.restart()
                self._note(f"jinfercept: the engine failed: {error.failure}; it was started anew: ask again")
                return
        self.messages += [question, *output.outputs[0].messages]
        self._end_line()
        self._note(_summary(output))

    def _command(self, name: str, argument: str = "") -> None:
        match name:
            case "/help":
                self._note("\n".join(f"{command:12} {text}" for command, text in COMMANDS.items()))
            case "/reset":
                self.messages = list(self._system)
                self._note("a new conversation")
            case "/save" if argument:
                try:
                    Path(argument).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
                    self._note(f"{len(self.messages)} messages in {argument}")
                except OSError as error:
                    self._note(f"not saved: {error}")
            case _:
                self._note(f"the commands are {', '.join(COMMANDS)}")

    def _follow(self, stream: Stream) -> RequestOutput:
        calls: tuple[Call, ...] = ()
        try:
            for event in stream:
                match event:
                    case Content():
                        self._end_thought()
                        print(harmless(event.text), end="", flush=True)
                        self._column = not event.text.endswith("\n")
                    case Reasoning():
                        if not self._thinks:
                            self._end_line()
                        self._console.print(harmless(event.text), style="dim", markup=False, soft_wrap=True, end="")
                        self._thinks = True
                    case Intercepted():
                        calls = event.calls
                        self._wait(calls)
                        if any(call.name in self._inbox.tools for call in calls):
                            self._stop_waiting()
                            answer_calls(self._inbox, calls, self._ask, self._note)
                    case Resumed():
                        self._stop_waiting()
                        for call, result in zip(calls, event.results, strict=True):
                            self._note(f"{_written(call)} → {_short(result.text)}  ({result.duration_s:.1f} s)")
                    case _:
                        pass
        finally:
            self._stop_waiting()
        [output] = stream.outputs.values()
        return output

    def _wait(self, calls: Sequence[Call]) -> None:
        self._end_line()
        self._status = self._console.status(escape(harmless(", ".join(map(_written, calls)))))
        self._status.start()

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()

    def _end_thought(self) -> None:
        if self._thinks:
            self._console.print()
            self._thinks = False

    def _end_line(self) -> None:
        self._end_thought()
        if self._column:
            print(flush=True)
            self._column = 0

    def _note(self, text: str) -> None:
        self._console.print(harmless(text), style="dim", markup=False, soft_wrap=True)


@contextmanager
def lines() -> Iterator[Callable[[], str | None]]:
    """Read lines of standard input: at a terminal with a prompt, editing, and a history that outlives the chat."""
    if not sys.stdin.isatty():
        yield lambda: sys.stdin.readline() or None
        return
    with suppress(ImportError):
        import readline

        history = cache_directory() / "chat_history"
        with suppress(OSError):
            readline.read_history_file(history)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield _ask
        finally:
            with suppress(OSError):
                readline.write_history_file(history)
        return
    yield _ask


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n/quit or Ctrl-D leaves", file=sys.stderr)
        return ""


def _written(call: Call) -> str:
    try:
        arguments = json.loads(call.arguments)
        inside = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    except (ValueError, AttributeError):
        inside = call.arguments
    return f"{call.name}({_short(inside)})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"


def _summary(output: RequestOutput) -> str:
    completion, metrics = output.outputs[0], output.metrics
    parts = []
    if completion.finish_reason != "stop":
        why = completion.finish_reason if completion.stop_reason is None else completion.stop_reason
        parts.append({"length": "cut at --max-tokens or the window", "abort": "stopped"}.get(str(why), str(why)))
    parts.append(f"{completion.num_generated} tokens")
    if metrics.first_token_s is not None:
        writing_s = metrics.finished_s - metrics.first_token_s - metrics.intercepted_s
        if writing_s > 0:
            parts.append(f"{(completion.num_generated - 1) / writing_s:.1f} tokens/s")
        parts.append(f"{metrics.first_token_s - metrics.arrival_s:.2f} s to the first")
    parts.append(f"{output.num_cached_tokens} of {len(output.prompt_tokens)} prompt tokens kept")
    uses = [pause.context for pause in completion.interceptions if pause.context is not None]
    if uses:
        kept, copied, recomputed = (sum(use[place] for use in uses) for place in range(3))
        parts.append(f"context over calls: {kept} kept, {copied} copied in, {recomputed} recomputed")
    return "; ".join(parts)


def answer_calls(
    inbox: Inbox, calls: Sequence[Call], ask: Callable[[], str | None], note: Callable[[str], None]
) -> None:
    """Ask for the results of the calls of a turn that wait for a person. An empty line declines a call.

    Args:
        ask: reads a line; returns None at the end of the input.
        note: shows a text.
    """
    num_waiting = sum(call.name in inbox.tools for call in calls)
    until_s = time.monotonic() + _TIMEOUT_S  # a call with wrong arguments never reaches the inbox
    while num_waiting and time.monotonic() < until_s:
        for pending in inbox.pending()[:1]:
            arguments = ", ".join(str(value) for value in pending.arguments.values())
            note(f"{pending.tool} asks: {arguments}  (an empty line declines)")
            text = (ask() or "").strip()
            try:
                inbox.answer(pending.id, text) if text else inbox.decline(pending.id)
            except RequestError:
                note("too late: it waits no more")
            num_waiting, until_s = num_waiting - 1, time.monotonic() + _TIMEOUT_S
        time.sleep(_POLL_S)
