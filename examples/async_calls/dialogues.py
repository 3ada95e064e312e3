"""Dialogues with asynchronous calls in context markup language (AsyncLM, arXiv 2412.07017), made from a seed.

A prompt asks up to four things that tools know, and sometimes the total of two of the answers. The agent calls the tools,
writes a sentence while each of them works, waits in a trap, and answers line by line. The runtime's interrupts stand where a
runtime would have put them: at any token outside of frames. The prompt's first line says whether calls are asynchronous or
synchronous.

Knows a tokenizer, and neither models nor engines.
"""

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Literal, NamedTuple

from examples.async_calls.items import ITEMS, LOOKUPS, SUM_PROSE, TOTAL_PROSE
from examples.async_calls.vocabulary import CALL, END, HEAD, INTERRUPT, TRAP, Codec

MAX_QUESTIONS = 4
IDS = "pqrst"
"""The id of a question and of its call, by its place in the list: tokens that mean nothing else."""
MOST = 99
"""The largest number; all from 1 on are as likely to be the value of a lookup."""
TOTAL = "total"
"""The tool that adds the values of two other questions, named by their ids."""
NUM_PARTS = 8
"""Pairs of a tool and its arguments are divided into so many parts. Validation and test have one each, training the rest."""

Mode = Literal["async", "sync"]
Split = Literal["training", "validation", "test"]


class Question(NamedTuple):
    """One thing to find out.

    Attributes:
        tool: a name in `LOOKUPS`, "add" or `TOTAL`.
        item: what a lookup is about.
        terms: the numbers that "add" adds; for `TOTAL`, the places of two other questions, from 0.
    """

    tool: str
    item: str = ""
    terms: tuple[int, int] = (0, 0)

    @property
    def dependent(self) -> bool:
        """Whether it needs answers of others."""
        return self.tool == TOTAL


class Dialogue(NamedTuple):
    """Questions, and what the tools return to each."""

    questions: tuple[Question, ...]
    values: tuple[int, ...]


class Piece(NamedTuple):
    """A part of what the agent writes, as text: prose, a trap, or the call of the question at a place."""

    kind: Literal["prose", "call", "trap"]
    text: str
    place: int = -1


class Tokens(NamedTuple):
    """A dialogue: the prompt, then tokens that the agent wrote, which are `written`, and the interrupts of the runtime."""

    ids: list[int]
    written: list[bool]


def dialogues(seed: int, split: Split, most: int = MAX_QUESTIONS) -> Iterator[Dialogue]:
    """Dialogues without an end, of 1 to `most` questions and perhaps a total; the same ones for the same seed and split."""
    rng = random.Random(f"{split} {seed}")
    while True:
        number = rng.randint(1, most)
        questions = [_question(rng, split) for _ in range(number)]
        if len(set(questions)) < number:
            continue
        values = [sum(q.terms) if q.tool == "add" else rng.randint(1, MOST) for q in questions]
        if number > 1 and rng.random() < 0.6:
            first, second = sorted(rng.sample(range(number), 2))
            if values[first] + values[second] > MOST:
                continue
            questions.append(Question(TOTAL, terms=(first, second)))
            values.append(values[first] + values[second])
        yield Dialogue(tuple(questions), tuple(values))


def _question(rng: random.Random, split: Split) -> Question:
    while True:
        tool = rng.choice([*LOOKUPS, "add"])
        if tool == "add":
            total = rng.randint(2, MOST)
            first = rng.randint(1, total - 1)
            question = Question(tool, terms=(first, total - first))
        else:
            question = Question(tool, rng.choice(list(ITEMS)))
        arguments = question.terms if tool == "add" else (question.item,)
        if _split(f"{tool} {arguments}") == split:
            return question


def _split(call: str) -> Split:
    """The dialogues that have a call."""
    match zlib.crc32(call.encode()) % NUM_PARTS:
        case 0:
            return "validation"
        case 1:
            return "test"
        case _:
            return "training"


# -- text --------------------------------------------------------------------------------------------------------------


def prompt(questions: Sequence[Question], mode: Mode) -> str:
    """The text that the agent continues."""
    lines = [f"\n- {id_}: {_asked(question)}" for id_, question in zip(IDS, questions, strict=False)]
    return f"Calls: {mode}{''.join(lines)}\n\n"


def answer(dialogue: Dialogue) -> str:
    """The text behind the last frame: lines with all values."""
    return "".join(f"\n- {id_}: {value}" for id_, value in zip(IDS, dialogue.values, strict=False))


def script(dialogue: Dialogue, mode: Mode) -> list[Piece]:
    """What the agent writes: asynchronous calls share a trap, synchronous ones have one each."""
    pieces, trap = list[Piece](), Piece("trap", f"{TRAP} {END}")
    for place, question in enumerate(dialogue.questions):
        if question.dependent and mode == "async":
            pieces.append(trap)
        pieces.append(Piece("call", f"{CALL} {IDS[place]} {HEAD} {code(dialogue, question)} {END}", place))
        pieces += [trap] if mode == "sync" else []
        pieces.append(Piece("prose", f"{_prose(question)}.\n"))
    pieces += [trap] if mode == "async" else []
    return [*pieces, Piece("prose", answer(dialogue))]


def code(dialogue: Dialogue, question: Question) -> str:
    """The call of a question's tool."""
    if question.tool == "add":
        return f"add({question.terms[0]}, {question.terms[1]})"
    if question.dependent:
        return f"{TOTAL}({', '.join(f'{IDS[place]}={dialogue.values[place]}' for place in question.terms)})"
    return f'{question.tool}("{question.item}")'


def interrupt(id_: str, value: int) -> str:
    """What the runtime writes when a call returns."""
    return f"{INTERRUPT} {id_} {HEAD} {value} {END}"


def _asked(question: Question) -> str:
    """A question; its words have the distances from its id that they have in the call, which a small model learns soon."""
    if question.item:
        return f"{question.tool}: {question.item}"
    first, second = (IDS[term] if question.dependent else term for term in question.terms)
    return f"{question.tool}: {first} + {second}"


def _prose(question: Question) -> str:
    if question.dependent:
        return TOTAL_PROSE
    return SUM_PROSE if question.tool == "add" else ITEMS[question.item]


# -- tokens ------------------------------------------------------------------------------------------------------------


def woven(seed: int, split: Split, codec: Codec, most: int = MAX_QUESTIONS) -> Iterator[Tokens]:
    """Dialogues in tokens without an end, see `dialogues`; two of three are asynchronous."""
    for number, dialogue in zip(count(), dialogues(seed, split, most), strict=False):
        rng = random.Random(f"{split} {seed} {number}")
        mode: Mode = "sync" if rng.random() < 1 / 3 else "async"
        yield weave(dialogue, mode, delays(rng, dialogue), rng, codec)


def delays(rng: random.Random, dialogue: Dialogue, slowest: int = 60) -> dict[int, float]:
    """How many tokens the agent writes until a question's call returns, by its place; a third return during the trap only."""
    places = range(len(dialogue.questions))
    return {place: float("inf") if rng.random() < 0.35 else rng.uniform(0, slowest) for place in places}


def weave(dialogue: Dialogue, mode: Mode, delays: Mapping[int, float], rng: random.Random, codec: Codec) -> Tokens:
    """A dialogue in tokens.

    Args:
        dialogue, mode: which.
        delays: how many tokens the agent writes until a question's call returns, by its place. The interrupt follows the first
            token after that which is outside of frames. A trap waits for calls that take longer; they return in any order.
        rng: draws this order.
        codec: encodes.
    """
    weaver = _Weaver(dialogue, mode, codec)
    for piece in script(dialogue, mode):
        tokens = codec.part(piece.text)
        for part in [(token,) for token in tokens] if piece.kind == "prose" else [tokens]:
            weaver.write(part)
            if piece.kind == "call":
                weaver.pending[piece.place] = weaver.num_written + delays[piece.place]
            weaver.interrupt(weaver.all_pending(rng) if piece.kind == "trap" else weaver.returned())
    weaver.write((codec.end,))
    return Tokens(weaver.ids, weaver.written)


class _Weaver:
    """The tokens so far, and for every pending call the number of written tokens at which it returns."""

    def __init__(self, dialogue: Dialogue, mode: Mode, codec: Codec) -> None:
        self.ids = codec.prompt(prompt(dialogue.questions, mode))
        self.written = [False] * len(self.ids)
        self.pending, self.num_written = dict[int, float](), 0
        self._dialogue, self._codec = dialogue, codec

    def write(self, tokens: Sequence[int]) -> None:
        """Append tokens of the agent."""
        self.ids += tokens
        self.written += [True] * len(tokens)
        self.num_written += len(tokens)

    def returned(self) -> list[int]:
        """The calls that have returned, first come first."""
        places = (place for place, at in self.pending.items() if at <= self.num_written)
        return sorted(places, key=self.pending.__getitem__)

    def all_pending(self, rng: random.Random) -> list[int]:
        """All calls, in any order."""
        return rng.sample(list(self.pending), len(self.pending))

    def interrupt(self, places: Sequence[int]) -> None:
        """Append the results of calls."""
        for place in places:
            tokens = self._codec.part(interrupt(IDS[place], self._dialogue.values[place]))
            self.ids += tokens
            self.written += [False] * len(tokens)
            del self.pending[place]
