"""The text of one request while it grows: detokenization, stop strings, results of tools in between.

It decides about text only: the engine decides whether the request is finished, and detectors find the calls.
"""

from collections.abc import Callable, Iterable
from typing import Self, final

from jinfercept.chat.parsers.source import Marks
from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.request import Request


@final
class TextStream:
    """A request's text, fed with tokens, cut at the first stop string that is complete.

    Text is held back while it could be the beginning of a stop string. The cut depends on the text alone, not on how
    tokens divide it: the stop string that is complete first wins, the longest where several end at the same character. One
    that begins within a call is part of the call.

    Attributes:
        stopped: the stop string that was found, if any; no token may follow.
        last_raw: the text of the last generated token, neither held back nor cut, special tokens written out: the input
            of detectors.
        hidden: tokens that end the text and are left out of it.
        num_taken: characters that the last generated token adds to the text, whether shown or held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        min_tokens: int = 0,
        markup: frozenset[int] = frozenset(),
        turn_ends: frozenset[int] = frozenset(),
        in_call: Callable[[str, str], bool] | None = None,
    ) -> None:
        """An empty text.

        Args:
            stop: non-empty strings that end the text.
            include_stop: whether the stop string itself is shown.
            skip_special_tokens: whether special tokens are left out of the text.
            min_tokens: generated tokens within which no stop string may end; one that began in them counts if it ends later.
            markup: special tokens that are never left out.
            turn_ends: tokens that are always left out, and behind which no text is held back.
            in_call: whether a text is part of a call, for which nothing is cut: gets the text in front of it that is new and
                certain, as the next text to show begins, and the text itself. None: there are no calls.
        """
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, markup)
        self._turn_ends, self.hidden = turn_ends, frozenset[int]()
        self._stops, self._marks = tuple(sorted(stop, key=len, reverse=True)), Marks(stop)
        self._include_stop, self._in_call = include_stop, in_call
        self._num_early = min_tokens
        self._incomplete = ""
        self._shown: list[str] = []
        self.stopped: str | None = None
        self.last_raw = ""
        self.num_taken = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request) -> Self:
        """The text of a request."""
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
        """Whether the text ends within a character."""
        return self._detokenizer.half_character

    def add(self, token_id: int) -> str:
        """Add a generated token; returns the new text to show."""
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
        """Add the tokens of a tool's result; returns the new text to show, which includes all of them.

        Stop strings are not looked for in it, and none spans its borders: text held back before is released, and half a
        character on either side becomes U+FFFD.
        """
        assert self.stopped is None, "an injection after the stop string"
        self.last_raw = ""
        pieces = [self._release(), *map(self._detokenizer.add, token_ids), self._detokenizer.flush()]
        return self._show("".join(pieces))

    def finish(self) -> str:
        """End the text; returns the text held back, half a character as U+FFFD. Nothing is left after a stop string."""
        return self._show(self._release())

    def token_text(self, token_id: int) -> str:
        """A token alone, special tokens written out."""
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
        """The longest stop string with which a text ends that is no part of a call; "" if there is none."""
        certain = self._marks.certain(text)
        for stop in self._stops:
            before = text[: min(len(text) - len(stop), certain)]
            if text.endswith(stop) and (self._in_call is None or not self._in_call(before, stop)):
                return stop
        return ""

    def _release(self) -> str:
        """The text held back and an incomplete character; the search for stop strings begins anew."""
        if self.stopped is not None:
            return ""
        released, self._incomplete = self._incomplete + self._detokenizer.flush(), ""
        return released

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
