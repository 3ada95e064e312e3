"""Skills of invented tools: a table of what each does with its parameters (`skills.txt`), and such as are made up of words by chance.

A line has verbs, names of what they are done to, the name of a function, and parameters: `name?:kind@word,word` is one that may
be left out (`?`), of a kind of `values.py`, that a question writes behind one of the words.
"""

import random
from pathlib import Path
from typing import NamedTuple

from examples.tool_adapter.lexicon import Lexicon

_VERBS = (
    "get|fetch|show find|locate|search for create|make|add delete|remove update|change calculate|compute analyze|examine "
    "check|inspect register|record schedule|plan start|launch stop|halt export|save list|show compare|match estimate|predict "
    "send|submit track|follow convert|transform validate|verify order|request sort|arrange configure|set up archive|store "
    "simulate|model assign|give measure|determine clean|wash repair|fix print|display approve|accept reject|refuse sync|merge"
).replace("search for", "search_for").replace("set up", "set_up").split()
_COMMON_PARAMETERS = (
    "city:city@in location:city@in,near country:country@in,of date:date@on start_date:date@from end_date:date@to,until time:time@at "
    "year:year@in name:name@named title:title@titled id:code user_id:count code:code@with limit:count amount:money@of "
    "quantity:count count:count price:money rate:percent@at threshold:number weight:mass@of length:length@of height:length "
    "speed:speed@at temperature:temperature@at duration:duration@for distance:length@of size:size@in color:colour@in "
    "unit:unit@in priority:priority@with status:status category:topic@in type:material format:fileformat@as,in "
    "language:language@in language:language email:email@to owner:person@of,by customer:person@for author:person@by "
    "company:company@of,by items:words@of,with tags:words@with values:numbers@of,with scores:numbers products:products "
    "cities:citys@in names:persons@for details:record@with filters:record path:path@from file:path url:url@from "
    "message:sentence note:sentence reason:sentence level:level@at method:method@with,by sort_order:sortorder@in "
    "verbose:flag include_archived:flag recursive:flag detailed:flag express:flag notify_owner:flag room:room@in "
    "season:season@in period:period@per mode:activity depth:length angle:angle@at voltage:voltage@at power:power@with "
    "frequency:frequency@at volume:volume@of area:surface@of force:force@with pressure:pressure@at memory:memory@with "
    "x:number y:number factor:number@by ratio:rate department:subject@in team:team@for region:country@in version:code"
).split()


class Parameter(NamedTuple):
    """A parameter of a skill.

    Attributes:
        kind: of its values, see `values.py`.
        before: words, of which a question may write one before the value.
    """

    name: str
    kind: str
    required: bool
    before: tuple[str, ...]


class Skill(NamedTuple):
    """What a tool does.

    Attributes:
        verbs: any of which asks for it.
        objects: what it is done to, under several names.
        name: of the function, in words joined by underscores.
        phrases: questions for it (`phrases.txt`), with places for parameters; what stands in brackets is for those that are told.
    """

    verbs: tuple[str, ...]
    objects: tuple[str, ...]
    name: str
    parameters: tuple[Parameter, ...]
    phrases: tuple[str, ...] = ()


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
_COMMON = tuple(map(_parameter, _COMMON_PARAMETERS))


def made_up(rng: random.Random, lexicon: Lexicon) -> Skill:
    """A skill that nobody has: a verb, an object and parameters by chance, so that words alone tell what belongs together."""
    verbs = tuple(verb.replace("_", " ") for verb in rng.choice(_VERBS).split("|"))
    words = [lexicon.word(rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    noun = " ".join(words)
    objects = rng.choice(((f"the {noun}",), (f"a {noun}", f"the {noun}"), (f"all {noun} records", f"the {noun} records")))
    chosen: dict[str, Parameter] = {}
    for parameter in rng.sample(_COMMON, rng.choice((1, 2, 2, 3, 3, 4, 5))):
        label = parameter.name if rng.random() < 0.6 else f"{rng.choice(words)}_{parameter.name}"
        if rng.random() < 0.1:
            label = f"{lexicon.word(rng)}_{parameter.name}"
        chosen[label] = parameter._replace(name=label, required=not chosen or rng.random() < 0.65)
    return Skill(verbs, objects, "_".join(words), tuple(chosen.values()))
