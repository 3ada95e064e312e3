"""Dialogues with asynchronous calls in context markup language (AsyncLM, arXiv 2412.07017), made from a seed.

A prompt asks up to four things that tools know, and sometimes the total of two of the answers. The agent calls the tools,
writes a sentence while each of them works, waits in a trap, and answers line by line. The runtime's interrupts stand where a
runtime would have put them: at any token outside of frames. The prompt's first line says whether calls are asynchronous or
synchronous. Tokens are those of a checkpoint's vocabulary, or of one for the dialogues with the delimiters as special tokens.

Knows neither models nor engines.
"""

import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple, final

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import ModelError

LOOKUPS = ("price", "weight", "shelf", "height", "age")

ITEMS = {
    "lamp": "Lamps give light after sunset",
    "pen": "Pens write until their ink dries",
    "book": "Books improve when read twice",
    "chair": "Chairs carry one person each",
    "table": "Tables gather people around meals",
    "clock": "Clocks announce every hour loudly",
    "cup": "Cups keep tea warm",
    "kettle": "Kettles sing once water boils",
    "knife": "Knives cut bread best when sharp",
    "spoon": "Spoons belong beside any soup",
    "basket": "Baskets bring apples home",
    "blanket": "Blankets help through cold nights",
    "candle": "Candles smell like holidays",
    "mirror": "Mirrors show much but remember nothing",
    "ladder": "Ladders lead up and down again",
    "hammer": "Hammers drive nails or find thumbs",
    "rope": "Ropes hold boats near land",
    "bell": "Bells call children inside",
    "brush": "Brushes turn paint into walls",
    "scarf": "Scarves protect necks from wind",
    "umbrella": "Umbrellas hide whenever rain falls",
    "violin": "Violins take ten years to learn",
    "drum": "Drums please only kind neighbours",
    "kite": "Kites need long lines",
    "tent": "Tents stay dry with tight cloth",
    "wheel": "Wheels go round all day",
    "bottle": "Bottles travel well when full",
    "ticket": "Tickets are small but promise plenty",
    "stamp": "Stamps send letters across seas",
    "map": "Maps know roads but no weather",
    "coat": "Coats have deep pockets",
    "plant": "Plants drink by the window",
}

SUM_PROSE = "Sums never tire calculators"
TOTAL_PROSE = "Totals must wait for others"


DELIMITERS = CALL, HEAD, END, TRAP, INTERRUPT = ("[CALL]", "[HEAD]", "[END]", "[TRAP]", "[INTR]")
END_OF_TEXT = "<|end|>"


@final
class Codec:
    """Encodes the parts of a dialogue. Delimiters that the vocabulary does not have as tokens are text.

    Attributes:
        end: the token that ends what the agent writes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer. Raises `ModelError` if it has no token that ends a text."""
        if not tokenizer.eos_token_ids:
            raise ModelError("the vocabulary has no end-of-text token", got="none", fix="use another checkpoint")
        self.tokenizer, self.end = tokenizer, min(tokenizer.eos_token_ids)
        self._parts = lru_cache(1 << 16)(lambda text: tuple(tokenizer.encode(text)))

    def prompt(self, text: str) -> list[int]:
        """The ids of the beginning of a dialogue, as the engine encodes a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def part(self, text: str) -> tuple[int, ...]:
        """The ids of a later part."""
        return self._parts(text)


def vocabulary(texts: Iterable[str]) -> Tokenizer:
    """Every word, number and punctuation of texts as one token, and single bytes for all else; delimiters are special.

    A word takes the space behind it along. Spaces around delimiters are dropped. So an id or a number is the same token in a
    prompt, a call and a result, and a model copies it without a translation.
    """
    splits = pre_tokenizers.Split(Regex("[A-Za-z]{2,} ?|[A-Za-z]|[0-9]+|[^A-Za-z0-9]+"), "isolated")
    pieces = pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    special, alphabet = [END_OF_TEXT, *DELIMITERS], sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = {part.strip(" ") for text in texts for part in re.split("|".join(map(re.escape, DELIMITERS)), text)}
    words = sorted({word for part in parts for word, _ in pieces.pre_tokenize_str(part)})
    ids = {token: id_ for id_, token in enumerate(dict.fromkeys([*special, *alphabet, *words]))}
    backend = Backend(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    backend.add_special_tokens(special)
    backend.normalizer = normalizers.Replace(Regex("^ +| +$"), "")  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pieces  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    end = ids[END_OF_TEXT]
    return Tokenizer(backend, eos_token_ids=frozenset({end}), special_tokens={"eos_token": END_OF_TEXT})


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
