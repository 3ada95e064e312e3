"""`DistinctIds`: every call of a conversation has its own id, though models write the same ones again."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import final

from jinfercept.events import CallEnded, CallStarted, Piece
from jinfercept.parsers.pieces import CallParser

_NUMBERED = re.compile(r"(.+:)\d+")


@final
class DistinctIds:
    """A parser for turns whose calls have ids that no earlier call has.

    A second `functions.name:0` has the number of the calls before it, since templates read the name in such an id.

    Args:
        used: ids of earlier calls; those of the turn are added.
        new_id: makes an id, in the form that the template takes.
    """

    def __init__(self, parser: CallParser, used: set[str], new_id: Callable[[], str]) -> None:
        self._parser, self._used, self._new_id = parser, used, new_id
        self._id = ""  # of the open call

    def feed(self, text: str) -> list[Piece]:
        return self._all_distinct(self._parser.feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        return self._all_distinct(self._parser.finish(cut))

    def in_call(self, text: str) -> bool:
        return self._parser.in_call(text)

    def _all_distinct(self, pieces: list[Piece]) -> list[Piece]:
        for index, piece in enumerate(pieces):
            match piece:
                case CallStarted():
                    self._id = piece.id if piece.id not in self._used else self._unused(piece.id)
                    self._used.add(self._id)
                    pieces[index] = replace(piece, id=self._id)
                case CallEnded():
                    pieces[index] = replace(piece, call=replace(piece.call, id=self._id))
                case _:
                    pass
        return pieces

    def _unused(self, call_id: str) -> str:
        if (parts := _NUMBERED.fullmatch(call_id)) is None:
            return self._new_id()
        number = len(self._used)
        while (numbered := f"{parts[1]}{number}") in self._used:
            number += 1
        return numbered
