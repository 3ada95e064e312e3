"""Batches for training: dialogues packed into rows of one width, which attention keeps apart."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from examples.async_calls.dialogues import Tokens

_PACKED_TOGETHER = 16
"""Rows' worth of dialogues from which rows are filled: more leave less padding."""


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        ids: of the tokens; 0 behind the last dialogue of a row.
        positions: of every token in its dialogue.
        segments: the number of its dialogue in the row, from 1; 0 for padding.
        learnt: whether the next token is one of the same dialogue that the agent wrote: interrupts and prompts are not learnt.
    """

    ids: Int[np.ndarray, "B R"]
    positions: Int[np.ndarray, "B R"]
    segments: Int[np.ndarray, "B R"]
    learnt: Bool[np.ndarray, "B R"]


def batches(dialogues: Iterator[Tokens], rows: int, width: int) -> Iterator[Batch]:
    """Batches of `rows` rows without an end, of dialogues without an end; those longer than `width` are left out."""
    waiting: list[list[Tokens]] = []
    while True:
        while len(waiting) < rows:
            waiting += pack(list(islice(dialogues, rows * _PACKED_TOGETHER)), width)
        yield batch(waiting[:rows], width)
        del waiting[:rows]


def pack(dialogues: Sequence[Tokens], width: int) -> list[list[Tokens]]:
    """Dialogues in rows of `width` tokens, first fit with the longest first; the rows in the order of their first dialogues."""
    rows: list[list[Tokens]] = []
    room: list[int] = []
    for dialogue in sorted(dialogues, key=lambda dialogue: -len(dialogue.ids)):
        length = len(dialogue.ids)
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if length > width:
            continue
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(dialogue)
        room[row] -= length
    order = {id(dialogue): place for place, dialogue in enumerate(dialogues)}
    return sorted(rows, key=lambda row: order[id(row[0])])


def batch(rows: Sequence[Sequence[Tokens]], width: int) -> Batch:
    """The arrays of rows."""
    shape = (len(rows), width)
    made = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool))
    for i, row in enumerate(rows):
        start = 0
        for segment, (ids, written) in enumerate(row, 1):
            stop = start + len(ids)
            made.ids[i, start:stop] = ids
            made.positions[i, start:stop] = range(len(ids))
            made.segments[i, start:stop] = segment
            made.learnt[i, start : stop - 1] = written[1:]
            start = stop
    return made
