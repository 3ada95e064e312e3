"""Separates a model's reasoning from its answer. The formats have the names that vLLM's `--reasoning-parser` uses.

A turn that begins with reasoning may have more of it behind its texts and calls. In a turn that begins otherwise an opening
mark opens reasoning only directly behind a call. In quotes, in code, and where the prompt has closed the reasoning, marks are
text. Closing marks with which an answer begins are dropped, as some models write or repeat them. A call within reasoning is not
a call, unless the turn ends with it before the reasoning is closed (`TrailingCalls`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, final

from jinfercept.chat.parsers.source import CallParser, Marks
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning


@final
class TrailingCalls:
    """Reads reasoning while it comes; how the text is divided makes no difference.

    Args:
        tags: the tags of the format of calls, with which a call begins.
        names: the tools that are offered; None if unknown.

    Attributes:
        start: the number of characters so far that belong to no call at the end.
    """

    def __init__(self, tags: tuple[str, ...], parser: Callable[[], CallParser], names: Collection[str] | None) -> None:
        self._arguments = tags, parser, names
        self._marks, self._make, self._names = Marks(tags), parser, names
        self.start = 0
        self._tail = ""  # from `start` on
        self._parser: CallParser | None = None  # of the tail, if it begins with a tag
        self._num_read = 0  # characters of the tail that it has read
        self._pieces: list[CallStarted | Arguments | CallEnded] = []

    def anew(self) -> "TrailingCalls":
        """The same for other reasoning of the turn."""
        return TrailingCalls(*self._arguments)

    def feed(self, text: str) -> None:
        """The next text of the reasoning."""
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
        """The calls at the end of the text, with spans that count from `start`; empty if there are none."""
        if self._parser is None or not self._are_calls(self._parser.finish()):
            return []
        kinds = [type(piece) for piece in self._pieces]
        return self._pieces if kinds.count(CallStarted) == kinds.count(CallEnded) > 0 else []

    def _are_calls(self, pieces: list[Piece]) -> bool:
        """Whether the text is still nothing but calls with these pieces."""
        self._pieces += [piece for piece in pieces if isinstance(piece, CallStarted | Arguments | CallEnded)]
        return not any(
            piece.text.strip()
            if isinstance(piece, Content)
            else isinstance(piece, CallStarted) and self._names is not None and piece.name not in self._names
            for piece in pieces
        )

    def _last_tag(self, text: str) -> int:
        """The offset of the last tag behind the beginning of a text; that of half a tag at its end if there is none."""
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
    """How a family marks its reasoning.

    Attributes:
        opening, closing: the marks; never shown at a turn's beginning and end of reasoning.
        begins: where a turn begins if its prompt ends with neither mark.
    """

    opening: str
    closing: str
    begins: Beginning = "undecided"

    def beginning(self, prompt: str) -> Beginning:
        """Returns where a turn begins behind this prompt: many templates open the reasoning, or close it to suppress it."""
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
    """The name of the format whose marks a chat template knows; None if there is none.

    Args:
        chat_template: the Jinja source. One that only removes earlier reasoning belongs to a model that always reasons.
    """
    for name, mark in _MARKS.items():
        if mark in chat_template:
            return name
    if "</think>" not in chat_template:
        return None
    return "qwen3" if "<think>" in chat_template else "deepseek_r1"


@final
class ReasoningParser:
    """A parser whose turns may have reasoning. White space beside it is dropped; a blank line parts what it separates.

    Args:
        answer: the parser of the text behind the reasoning.
        calls: finds the calls with which reasoning ends that never closes; None: there are none.
    """

    def __init__(
        self, format: ReasoningFormat, beginning: Beginning, answer: CallParser, calls: TrailingCalls | None = None
    ) -> None:
        self._format, self._at, self._answer, self._calls = format, beginning, answer, calls
        self._undecided = (
            ""  # undecided: the whole text; later what may be half a mark, and white space behind reasoning
        )
        self._thought = self._has_thought = False  # whether this part of the reasoning has text, or any
        self._trims, self._answered = False, False
        self._is_closed = beginning == "answering"
        self._is_behind_call, self._num_ticks, self._last_char = False, 0, ""  # of the answer
        self._gaps = ["", ""]  # before the next reasoning, and before the next text of the answer
        self._num_chars = self._num_fed = self._num_calls = 0  # not fed to the answer's parser; fed to it; its calls
        self._first_char: int | None = None  # of the reasoning, once there is some
        self._num_searched = 0  # characters of the reasoning that were searched for calls

    def feed(self, text: str) -> list[Piece]:
        self._undecided += text
        if self._at == "undecided":
            self._decide()
        pieces: list[Piece] = []
        at = "undecided"
        while at != self._at:
            at = self._at
            pieces += self._think() if at == "thinking" else self._answers()
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        if self._at == "thinking":
            calls = self._calls.finish() if self._calls is not None and not cut else []
            end = (
                _certain(self._undecided, self._format.closing)
                if cut
                else self._calls_begin()
                if calls
                else len(self._undecided)
            )
            pieces = self._show(self._undecided[:end])
            self._undecided = ""
            self._num_chars += end + self._num_fed
            pieces += self._shifted([replace(call, index=call.index + self._num_calls) for call in calls])
        elif cut and self._undecided.lstrip():
            self._undecided = ""
        return pieces + self._feed_answer(len(self._undecided)) + self._shifted(self._answer.finish(cut))

    def in_call(self, text: str) -> bool:
        return self._at != "thinking" and self._answer.in_call(text)

    def _decide(self) -> None:
        text, opening = self._undecided.lstrip(), self._format.opening
        if text.startswith(opening):
            self._at = "thinking"
            self._skip(len(self._undecided) - len(text) + len(opening))
        elif not opening.startswith(text) and (
            not self._format.closing.startswith(text) or text == self._format.closing
        ):
            self._at = "answering"

    def _think(self) -> list[Piece]:
        """The certain reasoning: up to the closing mark, or to the place where a mark or white space may begin."""
        self._search_calls()
        if not self._thought:
            self._drop_space()
        while not self._thought and self._undecided.startswith(self._format.opening):  # some models repeat it
            self._skip(len(self._format.opening))
            self._drop_space()
        closing = self._format.closing
        at = self._undecided.find(closing)
        if at >= 0:
            pieces = self._show(self._undecided[:at])
            self._skip(at + len(closing))
            self._at, self._trims = "answering", True
            return pieces
        marks = (closing,) if self._thought else (closing, self._format.opening)
        certain = min(self._calls_begin(), *(_certain(self._undecided, mark) for mark in marks))
        shown = self._undecided[:certain].rstrip()
        self._skip(len(shown))
        return self._show(shown)

    def _search_calls(self) -> None:
        """Search the next reasoning for calls at its end."""
        if self._first_char is None:
            self._first_char = self._num_chars
        if self._calls is not None and self._format.closing not in self._undecided:
            new = self._undecided[self._first_char + self._num_searched - self._num_chars :]
            self._calls.feed(new)
            self._num_searched += len(new)

    def _calls_begin(self) -> int:
        """The offset in `_undecided` from which on there may be calls."""
        if self._calls is None or self._first_char is None:
            return len(self._undecided)
        return self._first_char + self._calls.start - self._num_chars

    def _answers(self) -> list[Piece]:
        closing = self._format.closing
        while not self._answered:
            text = self._undecided.lstrip()
            if text.startswith(closing):
                self._skip(len(self._undecided) - len(text) + len(closing))
                self._trims = True
                continue
            if self._trims:
                self._drop_space()
            if closing.startswith(text):
                return []
            self._answered = True
        pieces: list[Piece] = []
        opening = self._format.opening
        while self._undecided:
            is_plain = self._is_closed or opening[0] not in self._undecided
            at = len(self._undecided) if is_plain else self._undecided.find(opening)
            pieces += self._feed_answer(_certain(self._undecided, opening) if at < 0 else at)
            if not self._undecided.startswith(opening):
                break
            if self._opens():
                self._gaps = ["\n\n" if self._has_thought else "", "\n\n" if self._last_char.strip() else ""]
                self._calls, self._first_char, self._num_searched = self._calls and self._calls.anew(), None, 0
                self._at, self._thought, self._answered = "thinking", False, False
                self._skip(len(opening))
                break
            pieces += self._feed_answer(len(opening))
        return pieces

    def _opens(self) -> bool:
        is_quoted = self._num_ticks % 2 == 1 or self._last_char in ("'", '"')
        may_open = (self._trims or self._is_behind_call) and not is_quoted
        return may_open and not self._answer.in_call(self._format.opening)

    def _feed_answer(self, length: int) -> list[Piece]:
        if not length:
            return []
        text, self._undecided = self._undecided[:length], self._undecided[length:]
        self._last_char = text[-1]
        gap, self._gaps[1] = self._gaps[1], ""
        self._num_chars, self._num_fed = self._num_chars - len(gap), self._num_fed + len(gap) + length
        pieces = self._answer.feed(gap + text)
        for piece in pieces:
            self._num_calls += isinstance(piece, CallStarted)
            self._num_ticks += piece.text.count("`") if isinstance(piece, Content) else 0
            if not isinstance(piece, Content) or piece.text.strip():
                self._is_behind_call = isinstance(piece, CallEnded)
        return self._shifted(pieces)

    def _show(self, text: str) -> list[Piece]:
        if not (text := text.rstrip()):
            return []
        gap, self._gaps[0] = self._gaps[0], ""
        self._thought = self._has_thought = True
        return [Reasoning(gap + text)]

    def _drop_space(self) -> None:
        self._skip(len(self._undecided) - len(self._undecided.lstrip()))

    def _skip(self, length: int) -> None:
        self._undecided = self._undecided[length:]
        self._num_chars += length

    def _shifted(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces with spans of calls that count from the beginning of the turn."""
        return [_moved(piece, self._num_chars) if isinstance(piece, CallEnded) else piece for piece in pieces]


@final
class PlainParser:
    """Text in which nothing is a call."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        return []

    def in_call(self, text: str) -> bool:
        return False


def _certain(text: str, mark: str) -> int:
    """The offset where a mark may have begun at the end of a text; the text's length if none has."""
    first = max(0, len(text) - len(mark) + 1)
    return next((at for at in range(first, len(text)) if mark.startswith(text[at:])), len(text))


def _moved(piece: CallEnded, by: int) -> CallEnded:
    first, end = piece.call.span
    return replace(piece, call=replace(piece.call, span=(first + by, end + by)))
