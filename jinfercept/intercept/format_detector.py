"""Finds calls in the format of a model family: all calls of a turn at its end."""

from collections.abc import Iterable
from typing import final

from jinfercept.calls import Call
from jinfercept.hooks import Watch
from jinfercept.intercept.parsed_turn import ParsedTurn
from jinfercept.parsers.tool_call_format import ToolCallFormat


@final
class FormatDetector:
    """The calls of one turn are found together, at the end-of-text token that ends it: they run in parallel.

    A turn that is cut off by a length limit calls nothing. The results of calls begin a new turn.
    """

    def __init__(self, format: ToolCallFormat, eos_token_ids: Iterable[int]) -> None:
        self._format, self._eos_token_ids = format, frozenset(eos_token_ids)

    def watch(self) -> Watch:
        return _FormatWatch(self._format, self._eos_token_ids)


class _FormatWatch:
    """Parses the current turn."""

    def __init__(self, format: ToolCallFormat, eos_token_ids: frozenset[int]) -> None:
        self._format, self._eos_token_ids = format, eos_token_ids
        self._turn = ParsedTurn(format.parser())

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        if token_id not in self._eos_token_ids:
            self._turn.feed(index, len(text), text)
            return ()
        self._turn.finish()
        calls = self._turn.spanning_tokens()
        self._turn = ParsedTurn(self._format.parser())
        return calls
