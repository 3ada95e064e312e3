"""Separates a model's reasoning from its answer. The formats have the names of vLLM's `--reasoning-parser`.

A turn that begins with reasoning may have more of it after its texts and calls. In other turns an opening mark opens reasoning
only directly after a call. Marks are text in quotes, in code, and where the prompt has closed the reasoning. Closing marks at
the beginning of an answer are dropped, since some models write or repeat them. A call within reasoning is no call, unless the
turn ends with it before the reasoning is closed (`TrailingCalls`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, final

from jinfercept.chat.parsers.source import CallParser, Marks, Steps
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning


@final
class TrailingCalls:
    """Finds calls at the end of reasoning, while it arrives. The result does not depend on how the text is divided."""

    def __init__(self, tags: tuple[str, ...], parser: Callable[[], CallParser], names: Collection[str] | None) -> None:
        # a call begins with a tag of its format; `names` are the offered tools, None if unknown
        self._marks, self._make, self._names = Marks(tags), parser, names
        self.start = 0  # characters so far that belong to no call at the end
        self._tail = ""  # from `start` on
        self._parser: CallParser | None = None  # of the tail, if it begins with a tag
        self._num_read = 0  # characters of the tail that it has read
        self._pieces: list[CallStarted | Arguments | CallEnded] = []

    def feed(self, text: str) -> None:
        """Add the next text of the reasoning."""
        self._tail += text
        while True:
            if self._parser is None:
                at, end = self._marks.find(self._tail, 0)
                self._move(at)
                if end < 0:
                    return
                self._parser = self._make()
            for char in self._tail[self._num_read :]:
                self._num_read += 1
                if not self._are_calls(self._parser.feed(char)):
                    self._move(self._last_tag(self._tail[: self._num_read]))
                    break
            else:
                return

    def finish(self) -> list[CallStarted | Arguments | CallEnded]:
        """Return the calls at the end of the text, with spans that count from `start`."""
        if self._parser is None or not self._are_calls(self._parser.finish()):
            return []
        kinds = [type(piece) for piece in self._pieces]
        return self._pieces if kinds.count(CallStarted) == kinds.count(CallEnded) > 0 else []

    def _are_calls(self, pieces: list[Piece]) -> bool:
        self._pieces += [piece for piece in pieces if isinstance(piece, CallStarted | Arguments | CallEnded)]
        return not any(
            piece.text.strip()
            if isinstance(piece, Content)
            else isinstance(piece, CallStarted) and self._names is not None and piece.name not in self._names
            for piece in pieces
        )

    def _last_tag(self, text: str) -> int:
        last, end = self._marks.find(text, 1)
        while end >= 0 and (span := self._marks.find(text, end))[1] >= 0:
            last, end = span
        return last

    def _move(self, by: int) -> None:
        self.start += by
        self._tail = self._tail[by:]
        self._parser, self._num_read, self._pieces = None, 0, []


Beginning = Literal["thinking", "undecided", "answering"]
"""Where a turn begins: within its reasoning, before a mark that may come or not, or behind it."""


@final
@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning."""

    opening: str  # the marks are not shown where they begin and end reasoning
    closing: str
    begins: Beginning = "undecided"  # where a turn begins if its prompt ends with neither mark

    def beginning(self, prompt: str) -> Beginning:
        """Return where a turn begins after a prompt. Many templates open the reasoning, or close it to suppress it."""
        text = prompt.rstrip()
        if text.endswith(self.opening):
            return "thinking"
        return "answering" if text.endswith(self.closing) else self.begins


_BOTH = ReasoningFormat("<think>", "</think>")
_CLOSES = ReasoningFormat("<think>", "</think>", begins="thinking")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": _BOTH,  # all that write both marks, or have the first in their prompt
        "deepseek_r1": _CLOSES,  # and QwQ
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
        "openai_gptoss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
        "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
        "holo2": _BOTH,
        "olmo3": _CLOSES,
    }
)
"""All reasoning formats by name, some under several."""

_MARKS = {
    "mistral": "[THINK]",
    "openai_gptoss": "<|channel|>analysis<|message|>",
    "apriel": "[BEGIN FINAL RESPONSE]",
    "gemma4": "<channel|>",
}
"""What templates of some formats have and others have not."""


def detect_reasoning_format(chat_template: str) -> str | None:
    """Return the name of the format whose marks a chat template, a Jinja source, has; None if there is none."""
    for name, mark in _MARKS.items():
        if mark in chat_template:
            return name
    if "</think>" not in chat_template:
        return None
    # a template that only removes earlier reasoning belongs to a model that always reasons
    return "qwen3" if "<think>" in chat_template else "deepseek_r1"


@final
class ReasoningParser:
    """A parser of turns that may have reasoning.

    White space beside reasoning is dropped, and a blank line separates the texts around it.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        beginning: Beginning,
        answer: CallParser,  # reads the text after the reasoning
        # finds calls at the end of reasoning that is never closed; None: such calls are not read
        calls: Callable[[], TrailingCalls] | None = None,
    ) -> None:
        self._opening, self._closing, self._answer, self._calls = format.opening, format.closing, answer, calls
        self._openings, self._closings = Marks((format.opening,)), Marks((format.closing,))
        self._no_text = re.compile(rf"\s*(?:{re.escape(self._opening)}\s*)*")  # some models repeat the mark
        self._is_closed = beginning == "answering"
        self._text, self._ended, self._cut = "", False, False  # what comes next
        self._thinking = self._has_thought = False  # at the moment, and whether any reasoning had text
        self._trims = False  # a closing mark came
        self._is_behind_call, self._num_ticks, self._last_char = False, 0, ""  # of the answer
        self._gaps = ["", ""]  # before the next reasoning, and before the next text of the answer
        self._num_chars = self._num_fed = self._num_calls = 0  # not fed to the answer's parser; fed to it; its calls
        self._pieces: list[Piece] = []
        self._steps = self._read(beginning)
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._advance()

    def finish(self, cut: bool = False) -> list[Piece]:
        self._ended, self._cut = True, cut
        return self._advance() + self._shifted(self._answer.finish(cut))

    def in_call(self, text: str) -> bool:
        return not self._thinking and self._answer.in_call(text)

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self, at: Beginning) -> Steps[None]:
        while at == "undecided":
            text = self._text.lstrip()
            if text.startswith(self._opening):
                at = "thinking"
                self._skip(len(self._text) - len(text) + len(self._opening))
            elif not self._ended and (
                self._opening.startswith(text) or (self._closing.startswith(text) and text != self._closing)
            ):
                yield
            else:
                at = "answering"
        self._thinking = at == "thinking"
        while not self._thinking or (yield from self._think()):
            if not (yield from self._read_answer()):
                return
            self._thinking = True

    def _think(self) -> Steps[bool]:
        # shows reasoning up to where a closing mark, or calls at its end, may have begun
        calls = self._calls and self._calls()
        num_read = num_searched = (
            0  # characters that were read; of those that follow, those that were searched for calls
        )
        has_text = False
        while (at := self._text.find(self._closing)) < 0:
            text = self._text
            first_call = len(text)
            if calls is not None:
                calls.feed(text[num_searched:])
                first_call = calls.start - num_read
            if self._ended:
                ends = calls.finish() if calls is not None and not self._cut else []
                end = self._closings.certain(text) if self._cut else first_call if ends else len(text)
                self._show(text[:end], has_text)
                self._num_chars, self._text = self._num_chars + end + self._num_fed, ""
                self._pieces += self._shifted([replace(call, index=call.index + self._num_calls) for call in ends])
                return False
            certain = min(first_call, self._closings.certain(text))
            if not has_text:
                certain = min(certain, self._openings.certain(text))
            length = self._show(text[:certain], has_text)
            has_text = has_text or length > 0
            num_read += length
            num_searched = len(text) - length
            self._skip(length)
            yield
        self._show(self._text[:at], has_text)
        self._skip(at + len(self._closing))
        self._thinking, self._trims = False, True
        return True

    def _read_answer(self) -> Steps[bool]:
        while not self._ended:
            text = self._text.lstrip()
            num_blanks = len(self._text) - len(text)
            if text.startswith(self._closing):
                self._skip(num_blanks + len(self._closing))
                self._trims = True
                continue
            self._skip(num_blanks if self._trims else 0)
            if not self._closing.startswith(text):
                break
            yield
        opening = self._opening
        while not self._ended:
            is_plain = self._is_closed or opening[0] not in self._text
            at = len(self._text) if is_plain else self._text.find(opening)
            self._feed_answer(self._openings.certain(self._text) if at < 0 else at)
            if not self._text.startswith(opening):
                yield
            elif self._opens():
                self._gaps = ["\n\n" if self._has_thought else "", "\n\n" if self._last_char.strip() else ""]
                self._skip(len(opening))
                return True
            else:
                self._feed_answer(len(opening))
        self._feed_answer(0 if self._cut and self._text.strip() else len(self._text))  # half a mark is no text
        return False

    def _opens(self) -> bool:
        is_quoted = self._num_ticks % 2 == 1 or self._last_char in ("'", '"')
        may_open = (self._trims or self._is_behind_call) and not is_quoted
        return may_open and not self._answer.in_call(self._opening)

    def _feed_answer(self, length: int) -> None:
        if not length:
            return
        text, self._text = self._text[:length], self._text[length:]
        self._last_char = text[-1]
        gap, self._gaps[1] = self._gaps[1], ""
        self._num_chars, self._num_fed = self._num_chars - len(gap), self._num_fed + len(gap) + length
        pieces = self._answer.feed(gap + text)
        for piece in pieces:
            self._num_calls += isinstance(piece, CallStarted)
            self._num_ticks += piece.text.count("`") if isinstance(piece, Content) else 0
            if not isinstance(piece, Content) or piece.text.strip():
                self._is_behind_call = isinstance(piece, CallEnded)
        self._pieces += self._shifted(pieces)

    def _show(self, text: str, has_text: bool) -> int:
        text = text.rstrip()
        begins = 0 if has_text else self._no_text.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
        if begins == len(text):
            return 0
        gap, self._gaps[0] = self._gaps[0], ""
        self._has_thought = True
        self._pieces.append(Reasoning(gap + text[begins:]))
        return len(text)

    def _skip(self, length: int) -> None:
        self._text = self._text[length:]
        self._num_chars += length

    def _shifted(self, pieces: Sequence[Piece]) -> list[Piece]:
        by = self._num_chars
        return [
            replace(piece, call=replace(piece.call, span=(piece.call.span[0] + by, piece.call.span[1] + by)))
            if isinstance(piece, CallEnded)
            else piece
            for piece in pieces
        ]


@final
class PlainParser:
    """A parser of text in which nothing is a call."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        return []

    def in_call(self, text: str) -> bool:
        return False
