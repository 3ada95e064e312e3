"""Short lessons before the dialogues: interrupts with letters as ids, then the value of each, in any order."""

import random
import string
from collections.abc import Iterator

from examples.async_calls.dialogues import MOST, Tokens, interrupt
from examples.async_calls.vocabulary import Codec

MAX_VALUES = 10


def recalls(seed: int, codec: Codec) -> Iterator[Tokens]:
    """Lessons without an end; of each line only the value is learnt. The same ones for the same seed."""
    rng = random.Random(f"recall {seed}")
    while True:
        yield _recall(rng, codec)


def _recall(rng: random.Random, codec: Codec) -> Tokens:
    number = rng.randint(1, MAX_VALUES)
    values = {id_: rng.randint(1, MOST) for id_ in rng.sample(string.ascii_lowercase, number)}
    tokens = Tokens([], [])
    for id_, value in values.items():
        _append(tokens, codec.part(interrupt(id_, value)), written=False)
    for id_ in rng.sample(list(values), number):
        as_in_answer = rng.random() < 0.7  # else as in the call of a total
        line = codec.part(f"\n- {id_}: {values[id_]}" if as_in_answer else f"({id_}={values[id_]}")
        prompt_end = len(line) - len(codec.part(str(values[id_])))
        _append(tokens, line[:prompt_end], written=False)
        _append(tokens, line[prompt_end:], written=True)
    return tokens


def _append(tokens: Tokens, part: tuple[int, ...], *, written: bool) -> None:
    tokens.ids.extend(part)
    tokens.written.extend([written] * len(part))
