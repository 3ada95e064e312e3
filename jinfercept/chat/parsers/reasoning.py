"""Separates a model's reasoning from its answer. The formats have the names of vLLM's `--reasoning-parser`.

Reasoning stands at the beginning of a turn; later marks are text. Closing marks at the beginning of an answer are dropped,
since some models write or repeat them. A call within reasoning is no call, unless the turn ends with it before the reasoning
is closed (`TrailingCalls`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, final

from jinfercept.chat.parsers.source import CallParser, Marks, Steps
from jinfercept.events import CallEnded, CallStarted, Content, Piece, Reasoning

_MOST_TAGS = 32
"""Tags at the end of reasoning that are tried as the beginning of its calls."""


@final
@dataclass(frozen=True, slots=True)
class TrailingCalls:
    """Finds the calls with which reasoning ends."""

    tags: Marks  # of the format; calls begin with one
    parser: Callable[[], CallParser]
    names: Collection[str] | None  # the offered tools; None: unknown

    def find(self, text: str) -> tuple[int, list[Piece]]:
        """Return where the calls at the end of a text begin, and their pieces, with spans that count from there."""
        starts, (start, end) = list[int](), self.tags.find(text, 0)
        while end >= 0:
            starts.append(start)
            start, end = self.tags.find(text, end)
        for start in starts[-_MOST_TAGS:]:
            parser = self.parser()
            pieces = parser.feed(text[start:]) + parser.finish()
            if self._are_calls(pieces):
                return start, [piece for piece in pieces if not isinstance(piece, Content)]
        return len(text), []

    def _are_calls(self, pieces: Sequence[Piece]) -> bool:
        names = [piece.name for piece in pieces if isinstance(piece, CallStarted)]
        is_plain = not any(isinstance(piece, Content) and piece.text.strip() for piece in pieces)
        are_offered = self.names is None or {*names} <= {*self.names}
        return is_plain and are_offered and sum(isinstance(piece, CallEnded) for piece in pieces) == len(names) > 0


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
    """A parser of turns that may begin with reasoning. White space beside reasoning is dropped."""

    def __init__(
        self,
        format: ReasoningFormat,
        beginning: Beginning,
        answer: CallParser,  # reads the text after the reasoning
        # finds calls at the end of reasoning that is never closed; None: such calls are not read
        calls: TrailingCalls | None = None,
    ) -> None:
        self._opening, self._closing, self._answer, self._calls = format.opening, format.closing, answer, calls
        self._openings, self._closings = Marks((format.opening,)), Marks((format.closing,))
        self._no_text = re.compile(rf"\s*(?:{re.escape(self._opening)}\s*)*")  # some models repeat the mark
        self._text, self._ended, self._cut = "", False, False  # what comes next
        self._thinking = False
        self._num_chars = 0  # not fed to the answer's parser
        self._pieces: list[Piece] = []
        self._steps = self._read(beginning)
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._advance()

    def finish(self, cut: bool = False) -> list[Piece]:
        self._ended, self._cut = True, cut
        return self._advance() + self._shifted(self._answer.finish(cut))

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
        if self._thinking and not (yield from self._think()):
            return
        yield from self._begin_answer(trims=self._thinking)
        while True:
            text, self._text = self._text, ""
            self._pieces += self._shifted(self._answer.feed(text))
            if self._ended:
                return
            yield

    def _begin_answer(self, trims: bool) -> Steps[None]:
        # closing marks, which models write or repeat there, and white space beside them are dropped
        self._thinking = False
        while True:
            text = self._text.lstrip()
            num_blanks = len(self._text) - len(text)
            if text.startswith(self._closing):
                self._skip(num_blanks + len(self._closing))
                trims = True
                continue
            self._skip(num_blanks if trims else 0)
            if self._ended or not self._closing.startswith(text):
                break
            yield
        if self._ended and self._cut and text and self._closing.startswith(text):
            self._skip(len(self._text))  # half a mark is no text

    def _think(self) -> Steps[bool]:
        # shows reasoning up to where a closing mark, or calls at its end, may have begun
        calls, has_text, num_searched = self._calls, False, 0
        while (at := self._text.find(self._closing, num_searched)) < 0:
            text = self._text
            if self._ended:
                end, ends = calls.find(text) if calls is not None and not self._cut else (len(text), [])
                end = self._closings.certain(text) if self._cut else end
                self._show(text[:end], has_text)
                self._skip(end)
                self._text = ""
                self._pieces += self._shifted(ends)
                return False
            certain = self._closings.certain(text)
            if calls is not None:
                certain = min(certain, calls.tags.find(text, 0)[0])
            if not has_text:
                certain = min(certain, self._openings.certain(text))
            length = self._show(text[:certain], has_text)
            has_text = has_text or length > 0
            self._skip(length)
            num_searched = max(0, len(self._text) - len(self._closing))
            yield
        self._show(self._text[:at], has_text)
        self._skip(at + len(self._closing))
        return True

    def _show(self, text: str, has_text: bool) -> int:
        text = text.rstrip()
        begins = 0 if has_text else self._no_text.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
        if begins == len(text):
            return 0
        self._pieces.append(Reasoning(text[begins:]))
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
