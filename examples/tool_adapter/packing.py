"""Lessons as rows of tokens: tokenised as the server writes them, and packed."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from examples.async_calls.dialogues import Tokens
from examples.tool_adapter.dialogues import Dialogue
from examples.tool_adapter.network import Batch
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.tokenizer.tokenizer import Tokenizer

_PACKED_TOGETHER = 256
"""Documents of which rows are filled: more leave less padding."""


class Document(NamedTuple):
    """Dialogues that begin alike.

    Attributes:
        beginning: token ids that all share; the agent wrote none of them.
        branches: the rest of every dialogue.
    """

    beginning: list[int]
    branches: list[Tokens]

    @property
    def num_tokens(self) -> int:
        """Of all of it."""
        return len(self.beginning) + sum(len(branch.ids) for branch in self.branches)


def tokens(tokenizer: Tokenizer, end_token_ids: tuple[int, ...], dialogue: Dialogue) -> Tokens:
    """A dialogue's tokens as the server writes them, and which of them the agent wrote."""
    template = ChatTemplate(tokenizer, (), None, {}, end_token_ids, written_tools=dialogue.tools)
    ids, written = list[int](), list[bool]()
    text = ""
    for place, message in enumerate(dialogue.messages, 1):
        if message["role"] != "assistant":
            continue
        before = template.render(dialogue.messages[: place - 1])
        after = template.render(dialogue.messages[:place], add_generation_prompt=False)
        for piece, is_written in ((before[len(text) :], False), (after[len(before) :].rstrip("\n"), True)):
            piece_ids = template.encode(piece)
            ids += piece_ids
            written += [is_written] * len(piece_ids)
        text = before + after[len(before) :].rstrip("\n")
    return Tokens(ids, written)


def document(tokenizer: Tokenizer, end_token_ids: tuple[int, ...], lesson: Sequence[Dialogue]) -> Document:
    """A lesson's tokens, those once that its dialogues share."""
    made = [tokens(tokenizer, end_token_ids, dialogue) for dialogue in lesson]
    shared = 0
    for alike in zip(*(branch.ids for branch in made), strict=False):
        if len(set(alike)) > 1 or any(branch.written[shared] for branch in made):
            break
        shared += 1
    return Document(made[0].ids[:shared], [Tokens(branch.ids[shared:], branch.written[shared:]) for branch in made])


def batches(documents: Iterator[Document], rows: int, width: int) -> Iterator[Batch]:
    """Batches of `rows` rows; a document that is longer than a row loses its last dialogues."""
    waiting: list[list[Document]] = []
    while True:
        while len(waiting) < rows:
            some = [shortened(made, width) for made in islice(documents, _PACKED_TOGETHER)]
            if not some:
                return
            waiting += _packed([made for made in some if made.branches], width)
        yield batch(waiting[:rows], width)
        del waiting[:rows]


def shortened(made: Document, width: int) -> Document:
    """The document with as many of its dialogues as there is room for."""
    branches, room = [], width - len(made.beginning)
    for branch in made.branches:
        if len(branch.ids) <= room:
            branches.append(branch)
            room -= len(branch.ids)
    return made._replace(branches=branches)


def _packed(documents: Sequence[Document], width: int) -> list[list[Document]]:
    """Documents in rows of `width` tokens, first fit with the longest first; the rows in the order of their first documents."""
    order = {id(made): place for place, made in enumerate(documents)}
    rows: list[list[Document]] = []
    room: list[int] = []
    for made in sorted(documents, key=lambda made: -made.num_tokens):
        row = next((i for i, left in enumerate(room) if left >= made.num_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(made)
        room[row] -= made.num_tokens
    return sorted(rows, key=lambda row: order[id(row[0])])


def batch(rows: Sequence[Sequence[Document]], width: int) -> Batch:
    """The arrays of rows."""
    shape = (len(rows), width)
    ids, positions, documents, branch_numbers = (np.zeros(shape, np.int32) for _ in range(4))
    made = Batch(ids, positions, documents, branch_numbers, np.zeros(shape, bool))
    for i, row in enumerate(rows):
        start = 0
        for number, (beginning, branches) in enumerate(row, 1):
            parts = [Tokens(beginning, [False] * len(beginning)), *branches]
            for branch, (ids, written) in enumerate(parts):
                stop, first = start + len(ids), len(beginning) if branch else 0
                made.ids[i, start:stop] = ids
                made.positions[i, start:stop] = range(first, first + len(ids))
                made.documents[i, start:stop] = number
                made.branches[i, start:stop] = branch
                made.learnt[i, start : stop - 1] = written[1:]
                start = stop
    return made
