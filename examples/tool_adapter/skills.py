"""Skills of invented tools: a table of what each does with its parameters (`skills.txt`), and some made up of words by chance.

A line has verbs, names of what they are done to, the name of a function, and parameters: `name?:kind@word,word` is one that may
be left out (`?`), of a kind of `values.py`, that a question writes behind one of the words.
"""

import random
import re
from pathlib import Path
from typing import NamedTuple

from examples.tool_adapter.lexicon import Lexicon


class Parameter(NamedTuple):
    """A parameter of a skill.

    Attributes:
        kind: of its values, see `values.py`.
        before: words, of which a question may write one before the value.
        words: what descriptions and questions call it; by default its name.
    """

    name: str
    kind: str
    required: bool
    before: tuple[str, ...]
    words: str = ""

    @property
    def label(self) -> str:
        """What it is called."""
        return self.words or as_words(self.name)


class Skill(NamedTuple):
    """What a tool does.

    Attributes:
        verbs: any of which asks for it.
        objects: what it is done to, under several names.
        name: of the function, in words joined by underscores.
        phrases: questions for the skill (`phrases.txt`), with places for its parameters; words in brackets are left out of a
            question that does not tell the parameter within them.
    """

    verbs: tuple[str, ...]
    objects: tuple[str, ...]
    name: str
    parameters: tuple[Parameter, ...]
    phrases: tuple[str, ...] = ()


def as_words(name: str) -> str:
    """A name of a program as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def _parameter(text: str) -> Parameter:
    label, kind = text.split(":")
    kind, _, before = kind.partition("@")
    return Parameter(label.rstrip("?"), kind, not label.endswith("?"), tuple(filter(None, before.split(","))))


def _lines(name: str) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [[part.strip() for part in line.split("::")] for line in lines]


_PHRASES = {name: tuple(phrase.strip() for phrase in phrases.split(" | ")) for name, phrases in _lines("phrases.txt")}


def _skill(verbs: str, objects: str, name: str, parameters: str) -> Skill:
    parts = tuple(map(_parameter, parameters.split()))
    return Skill(tuple(verbs.split("|")), tuple(objects.split("|")), name, parts, _PHRASES.get(name, ()))


SKILLS = tuple(_skill(*line) for line in _lines("skills.txt"))
_MADE_UP = dict(_lines("made_up.txt"))
_VERBS = _MADE_UP["verbs"].split()
_COMMON = tuple(map(_parameter, _MADE_UP["parameters"].split()))


def made_up(rng: random.Random, lexicon: Lexicon) -> Skill:
    """A skill of a random verb, object and parameters: only equal words tell which question belongs to which tool."""
    verbs = tuple(verb.replace("_", " ") for verb in rng.choice(_VERBS).split("|"))
    words = [lexicon.word(rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    noun = " ".join(words)
    objects = rng.choice(
        ((f"the {noun}",), (f"a {noun}", f"the {noun}"), (f"all {noun} records", f"the {noun} records"))
    )
    chosen: dict[str, Parameter] = {}
    for parameter in rng.sample(_COMMON, rng.choice((1, 2, 2, 3, 3, 4, 5))):
        label = parameter.name if rng.random() < 0.6 else f"{rng.choice(words)}_{parameter.name}"
        if rng.random() < 0.1:
            label = f"{lexicon.word(rng)}_{parameter.name}"
        chosen[label] = parameter._replace(name=label, required=not chosen or rng.random() < 0.65)
    return Skill(verbs, objects, "_".join(words), tuple(chosen.values()))
