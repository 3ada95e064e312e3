"""Context markup language (CML): a model writes asynchronous calls and reads their results (AsyncLM, arXiv 2412.07017).

    [CALL] id [HEAD] name(argument=value) [END]    a call, complete at its `[END]`
    [TRAP] [END]                                   wait for every pending call
    [INTR] id [HEAD] result [END]                  a result, written by the runtime only

The delimiters are texts or, in vocabularies that have them, single special tokens: `CMLParser` reads both.
"""

import re
from typing import Literal, NamedTuple, final

from jinfercept.chat.parsers.reasoning import ReasoningFormat
from jinfercept.chat.parsers.source import Marks
from jinfercept.hooks import BadFrame, TrapFrame

MAX_FRAME_CHARS = 8192
"""Limit of a frame's text between its first delimiter and its `[END]`."""
MAX_ID_CHARS = 64
"""Limit of a call's id."""
MAX_DELIMITER_CHARS = 64
"""Limit of a delimiter."""

_WHOLE_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' + r"'''(?:[^\\]|\\.)*?'''|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'", re.DOTALL
)
_OPEN_STRING = re.compile(r"""\"{3}|'{3}|(?<!\w)["'][^\n]*\Z""")

Mark = Literal["call", "head", "end", "trap", "interrupt"]


class Delimiters(NamedTuple):
    """The delimiters of context markup language, as text."""

    call: str = "[CALL]"
    head: str = "[HEAD]"
    end: str = "[END]"
    trap: str = "[TRAP]"
    interrupt: str = "[INTR]"

    @property
    def are_distinct(self) -> bool:
        """Whether a text can hold the delimiters in only one way: none contains another, or begins with the end of another.

        Each must have at least two characters and no backslash, so that `escape` can split it.
        """
        if any(not 2 <= len(delimiter) <= MAX_DELIMITER_CHARS or "\\" in delimiter for delimiter in self):
            return False
        pairs = [(delimiter, other) for i, delimiter in enumerate(self) for j, other in enumerate(self) if i != j]
        contained = any(delimiter in other for delimiter, other in pairs)
        both = [*pairs, *((delimiter, delimiter) for delimiter in self)]
        overlap = any(
            delimiter[-n:] == other[:n] for delimiter, other in both for n in range(1, min(len(delimiter), len(other)))
        )
        return not contained and not overlap


DELIMITERS = Delimiters()
"""AsyncLM's delimiters."""


class CallFrame(NamedTuple):
    """A complete call, with the range of its characters in the parsed text."""

    id: str
    code: str
    span: tuple[int, int]


Frame = CallFrame | TrapFrame | BadFrame


@final
class CMLParser:
    """Reads the text of one request. The frames do not depend on how the text is divided.

    Delimiters within reasoning are text; so are written ones in a string of a call's code. A half-written delimiter is held
    back until it is complete or can no longer become one.
    """

    def __init__(
        self,
        delimiters: Delimiters = DELIMITERS,  # which `are_distinct`
        *,
        written: bool = True,  # delimiters are found in the text; otherwise only `feed_mark` brings them
        reasoning: ReasoningFormat | None = None,  # at any place outside frames; None: the text has none
        thinking: bool = False,  # the text begins within reasoning
    ) -> None:
        self._delimiters, self._thinking = delimiters, thinking and reasoning is not None
        marks: dict[str, Mark] = dict(zip(delimiters, Delimiters._fields, strict=True)) if written else {}  # pyright: ignore
        self._marks = marks
        self._opening, self._closing = (reasoning.opening, reasoning.closing) if reasoning else ("", "")
        self._outside = Marks((*marks, *filter(None, (self._opening,))))
        self._inside, self._reasoning = Marks((*marks,)), Marks((*filter(None, (self._closing,)),))
        self._incomplete = ""
        self._num_chars = 0  # of the text, without what is held
        self._kind: Mark | None = None  # of the open frame
        self._start = 0  # its first character
        self._id: str | None = None  # its id, once the `[HEAD]` has come
        self._parts: list[str] = []  # its text since the last delimiter
        self._size = 0  # characters of its text

    @property
    def clean(self) -> bool:
        """Whether a result may follow here: outside every frame, outside reasoning and outside half-written marks."""
        return self._kind is None and not self._thinking and not self._incomplete

    def feed(self, text: str) -> list[Frame]:
        """Read the next text, and return the frames that it completes."""
        frames: list[Frame] = []
        text, self._incomplete = self._incomplete + text, ""
        while text:
            expected = self._reasoning if self._thinking else self._outside if self._kind is None else self._inside
            at, end = expected.find(text, 0)
            mark = text[at:end] if end >= 0 else ""
            used = self._take(text[:at], frames)
            if mark and used == at and self._in_string:
                used += self._take(mark, frames)
                text = text[used:]
            elif used < at:  # the frame has reached its limit: the rest is outside of it
                text = text[used:]
            elif mark:
                if mark in self._marks and not self._thinking:
                    self._delimit(self._marks[mark], len(mark), frames)
                else:
                    self._num_chars += len(mark)
                    self._thinking = not self._thinking
                text = text[at + len(mark) :]
            else:
                self._incomplete, text = text[at:], ""
        return frames

    def feed_mark(self, mark: Mark) -> list[Frame]:
        """Read a delimiter that is a token, and return the frames that it completes. Within reasoning it is text."""
        frames: list[Frame] = []
        text, self._incomplete = self._incomplete, ""  # which is no mark
        while text:
            text = text[self._take(text, frames) :]
        name = getattr(self._delimiters, mark)
        if self._thinking:
            self._num_chars += len(name)
        else:
            self._delimit(mark, len(name), frames)
        return frames

    def end(self) -> list[BadFrame]:
        """End the text: an open call is a mistake, and reasoning is over. Another text may follow."""
        self._num_chars += len(self._incomplete)
        unfinished: list[Frame] = []
        if self._kind == "call":
            self._fail(f"no {self._delimiters.end} before the end of the text", self._num_chars, unfinished)
        self._incomplete, self._kind, self._thinking = "", None, False
        return [frame for frame in unfinished if isinstance(frame, BadFrame)]

    @property
    def _in_string(self) -> bool:
        if self._kind != "call" or self._id is None:
            return False
        # a string in single quotes ends at its line, if it does not end before
        return bool(_OPEN_STRING.search(_WHOLE_STRING.sub("", "".join(self._parts))))

    def _take(self, text: str, frames: list[Frame]) -> int:
        if self._kind is None or self._size + len(text) <= MAX_FRAME_CHARS:
            self._num_chars += len(text)
            if self._kind is not None:
                self._parts.append(text)
                self._size += len(text)
            return len(text)
        # the frame ends at its limit; the rest of the text is outside of it
        used = MAX_FRAME_CHARS - self._size + 1
        self._num_chars += used
        self._fail(f"no {self._delimiters.end} within {MAX_FRAME_CHARS} characters", self._num_chars, frames)
        return used

    def _delimit(self, mark: Mark, length: int, frames: list[Frame]) -> None:
        start = self._num_chars
        self._num_chars += length
        if mark == "end":
            self._close(frames)
        elif mark == "head":
            if self._kind == "call" and self._id is None:
                self._id, self._parts = "".join(self._parts).strip(), []
            elif self._kind == "call":  # text of its code
                self._parts.append(self._delimiters.head)
        else:
            if self._kind is not None:
                problem = f"no {self._delimiters.end} before the next {getattr(self._delimiters, mark)}"
                self._fail(problem, start, frames)
            self._kind, self._start, self._id, self._parts, self._size = mark, start, None, [], 0

    def _close(self, frames: list[Frame]) -> None:
        kind, span = self._kind, (self._start, self._num_chars)
        if kind == "trap":
            frames.append(TrapFrame(span))
            self._kind = None
        elif kind == "interrupt":
            self._fail(f"only the runtime writes {self._delimiters.interrupt}", self._num_chars, frames)
        elif kind == "call":
            problem = self._problem()
            if problem:
                self._fail(problem, self._num_chars, frames)
            else:
                frames.append(CallFrame(self._id or "", "".join(self._parts).strip(), span))
                self._kind = None

    def _problem(self) -> str:
        if self._id is None:
            return f"no {self._delimiters.head} between its id and its code"
        if not self._id:
            return f"no id between {self._delimiters.call} and {self._delimiters.head}"
        return f"an id of more than {MAX_ID_CHARS} characters" if len(self._id) > MAX_ID_CHARS else ""

    def _fail(self, problem: str, end: int, frames: list[Frame]) -> None:
        frames.append(BadFrame((self._id or "")[:MAX_ID_CHARS], problem, (self._start, end)))
        self._kind = None


def escape(text: str, delimiters: Delimiters = DELIMITERS) -> str:
    """Put backslashes into a text, so that it contains no delimiter.

    One backslash is put after the first character of each delimiter, in addition to any that stand there already.
    """
    for delimiter in delimiters:
        text = re.sub(rf"({re.escape(delimiter[0])})(\\*)(?={re.escape(delimiter[1:])})", r"\1\2\\", text)
    return text
