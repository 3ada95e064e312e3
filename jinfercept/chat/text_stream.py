"""The text of one request while it grows: detokenization, stop strings, and results of tools in between.

It decides only about text: the engine decides when the request is finished, and detectors find the calls.
"""

from collections.abc import Callable, Iterable
from typing import Self, final

from jinfercept.chat.parsers.source import Marks
from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.request import Request


@final
class TextStream:
    """A request's text, fed with tokens and cut at the first complete stop string.

    Text is held back while it could begin a stop string. The cut depends only on the text, not on how tokens divide it: the
    stop string that is complete first wins, and the longest of several that end at the same character. A stop string that
    begins within a call is part of the call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        # number of first tokens in which no stop string may end; one that begins in them counts if it ends later
        min_tokens: int = 0,
        markup: frozenset[int] = frozenset(),  # special tokens that are never left out
        turn_ends: frozenset[int] = frozenset(),  # always left out; no text is held back after them
        # whether a text, the second argument, is part of a call and must not be cut; the first argument is the certain new text
        # before it, with which the next shown text begins; None: there are no calls
        in_call: Callable[[str, str], bool] | None = None,
    ) -> None:
        """Begin an empty text."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, markup)
        self._turn_ends, self.hidden = turn_ends, frozenset[int]()  # hidden tokens end the text and are left out of it
        self._stops, self._marks = tuple(sorted(stop, key=len, reverse=True)), Marks(stop)
        self._include_stop, self._in_call = include_stop, in_call
        self._num_early = min_tokens
        self._incomplete = ""
        self._shown: list[str] = []
        self.stopped: str | None = None  # the stop string that was found; no token may follow it
        # text of the last generated token for detectors, neither held back nor cut, special tokens written out
        self.last_raw = ""
        self.num_taken = 0  # characters that the last generated token adds to the text, shown or held back

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request) -> Self:
        params = request.params
        stop = tuple(params.stop or ())
        return cls(tokenizer, stop, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens)

    @property
    def text(self) -> str:
        """Everything shown so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    @property
    def half_character(self) -> bool:
        return self._detokenizer.half_character

    def add(self, token_id: int) -> str:
        """Add a generated token, and return the new text to show."""
        assert self.stopped is None, "a token after the stop string"
        if token_id in self._turn_ends or token_id in self.hidden:
            self._num_early -= 1
            self.last_raw = "" if token_id in self._turn_ends else self._tokenizer.token_text(token_id)
            self.num_taken = 0
            return self.finish()
        text = self._detokenizer.add(token_id)
        self.last_raw = self._tokenizer.token_text(token_id) if token_id in self._tokenizer.special_ids else text
        self.num_taken = len(text)
        shown = self._take(text) if self._stops else self._show(text)
        self._num_early -= 1
        return shown

    def inject(self, token_ids: Iterable[int]) -> str:
        """Add the tokens of a tool's result, and return the new text to show, which includes all of them.

        Stop strings are neither searched in it nor across its borders: held text is released, and half a character becomes
        U+FFFD.
        """
        assert self.stopped is None, "an injection after the stop string"
        self.last_raw = ""
        pieces = [self._release(), *map(self._detokenizer.add, token_ids), self._detokenizer.flush()]
        return self._show("".join(pieces))

    def finish(self) -> str:
        """End the text, and return the text held back, with half a character as U+FFFD. Nothing is left after a stop string."""
        return self._show(self._release())

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def _take(self, text: str) -> str:
        pending = self._incomplete + text
        for end in range(len(self._incomplete) + 1, len(pending) + 1):
            if self._num_early <= 0 and pending.endswith(self._stops, 0, end) and (stop := self._cut(pending[:end])):
                self.stopped, self._incomplete = stop, ""
                return self._show(pending[: end if self._include_stop else end - len(stop)])
        num_certain = self._marks.certain(pending)
        self._incomplete = pending[num_certain:]
        return self._show(pending[:num_certain])

    def _cut(self, text: str) -> str:
        certain = self._marks.certain(text)
        for stop in self._stops:
            before = text[: min(len(text) - len(stop), certain)]
            if text.endswith(stop) and (self._in_call is None or not self._in_call(before, stop)):
                return stop
        return ""

    def _release(self) -> str:
        if self.stopped is not None:
            return ""
        released, self._incomplete = self._incomplete + self._detokenizer.flush(), ""
        return released

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
