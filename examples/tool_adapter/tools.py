"""Tools of dialogues: a skill under a name, with fields that have types, units and descriptions; and what is asked of it."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from examples.tool_adapter.lexicon import Lexicon
from examples.tool_adapter.skills import Parameter, Skill, as_words
from examples.tool_adapter.values import Field, Value, field

_SYNONYMS = {
    "city": ("location", "city_name", "place", "town"),
    "location": ("city", "place", "where"),
    "date": ("day", "on_date", "target_date"),
    "count": ("num", "number", "amount"),
    "limit": ("max_results", "n", "top_k"),
    "quantity": ("num_items", "count", "amount"),
    "symbol": ("ticker", "stock_symbol", "company_symbol"),
    "origin": ("from_city", "departure_city", "start"),
    "destination": ("to_city", "arrival_city", "end"),
    "start_date": ("from_date", "begin", "start"),
    "end_date": ("to_date", "until", "end"),
    "numbers": ("values", "data", "num_list"),
    "mass": ("m", "object_mass"),
    "velocity": ("v", "speed"),
    "time": ("t", "at_time", "time_of_day"),
    "country": ("country_name", "nation"),
    "text": ("content", "input_text", "message"),
    "title": ("name", "subject"),
    "years": ("num_years", "duration_years", "time_in_years"),
    "interest_rate": ("annual_rate", "rate"),
    "email": ("email_address", "mail"),
}


_DESCRIBED = {
    "city": ("The name of the {}", "{} name, where the request applies", "The city that is meant by {}"),
    "country": ("The name of the {}", "The country that is meant by {}"),
    "person": ("The name of the {}", "Full name of the {}", "The person who is the {}"),
    "money": ("The {} amount", "The amount of money of the {}", "Value of the {}"),
    "count": ("The number of {}", "How many {}", "An integer: the {}"),
    "number": ("The value of {}", "The numeric {}", "A number: the {}"),
    "date": ("The {} of the request", "The day of the {}", "Date: the {}"),
    "year": ("The {} to look at", "The specific {} for which the data is needed"),
    "title": ("The name or title of the {}", "Title: the {}"),
    "percent": ("The {} rate", "The annual {}", "The value of the {}"),
    "numbers": ("A list of numbers: the {}", "The array of {}", "List of {}"),
    "words": ("A list of {}", "The list of {}, as strings"),
    "code": ("The identifier: {}", "The unique {}", "{} of the item"),
    "sentence": ("The {} as text", "The content of the {}"),
    "length": ("The {} of the object", "The measured {}"),
    "mass": ("The {} of the object", "The measured {}"),
    "duration": ("The {} that it takes", "The length of the {}"),
    "language": ("The {} in which it should be", "Name of the {}"),
}
"""By kind what a description may say; the braces stand for the parameter."""


class Tool(NamedTuple):
    """A skill as a dialogue declares it.

    Attributes:
        parameters: under the names that the declaration has.
        fields: by those names.
        declaration: OpenAI-style.
    """

    skill: Skill
    parameters: tuple[Parameter, ...]
    fields: Mapping[str, Field]
    declaration: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the function."""
        return self.declaration["function"]["name"]


class Request(NamedTuple):
    """What is asked of a tool.

    Attributes:
        written: the values that the question has, by the name of the parameter.
    """

    tool: Tool
    written: dict[str, Value]

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the call."""
        return {name: value.value for name, value in self.written.items()}


def declare(rng: random.Random, lexicon: Lexicon, skill: Skill) -> Tool:
    """A tool of a skill: its own names, types and descriptions."""
    is_camel = rng.random() < 0.12
    short = rng.random() < 0.1
    names: dict[str, Parameter] = {}
    fields: dict[str, Field] = {}
    for parameter in skill.parameters:
        name = (
            rng.choice(_SYNONYMS[parameter.name])
            if parameter.name in _SYNONYMS and rng.random() < 0.35
            else parameter.name
        )
        name = name if name not in names else parameter.name
        words, kind = as_words(name), field(parameter.kind, rng, lexicon)
        if short and rng.random() < 0.6:
            name = _shortened(rng, name)
        elif kind.note.startswith("in ") and rng.random() < 0.2:
            name += f"_{kind.note}".replace(" ", "_").replace("/", "_per_")
        name = camel(name) if is_camel else name
        name = name if name not in names else parameter.name
        names[name], fields[name] = parameter._replace(name=name, words=words), kind
    shown = rng.choice(skill.objects)
    properties = {name: _property(rng, parameter, fields[name], shown) for name, parameter in names.items()}
    body = {
        "type": "object",
        "properties": properties,
        "required": [name for name, parameter in names.items() if parameter.required],
    }
    labels = [parameter.label for parameter in names.values()]
    declaration = {
        "name": _function_name(rng, skill),
        "description": _description(rng, skill, shown, labels),
        "parameters": body,
    }
    return Tool(skill, tuple(names.values()), fields, {"type": "function", "function": declaration})


def request(rng: random.Random, tool: Tool) -> Request:
    """What the tool needs, and some of what it may be told."""
    written = {}
    for parameter in tool.parameters:
        if parameter.required or rng.random() < 0.45:
            value = tool.fields[parameter.name].draw(rng)
            if parameter.kind == "flag" and rng.random() < 0.25:
                value = Value(False, "")
            written[parameter.name] = value
    return Request(tool, written)


def _shortened(rng: random.Random, name: str) -> str:
    """A name that says little, so that its description has to be read."""
    words = name.split("_")
    return rng.choice(
        ("_".join(word[:3] for word in words), "".join(word[0] for word in words), words[0][:4], f"arg_{words[0][0]}")
    )


def camel(name: str) -> str:
    """Words joined by underscores, joined by capitals instead."""
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def _function_name(rng: random.Random, skill: Skill) -> str:
    words = skill.name.split("_")
    verb = rng.choice(skill.verbs).split()[0]
    rest = [word for word in words if word != verb] or words
    return rng.choice(
        (
            skill.name,
            "_".join([verb, *rest]),
            "_".join([verb, *rest]),
            "_".join([*rest, verb]),
            f"{'_'.join(rest)}.{verb}",
            f"{rest[-1]}.{'_'.join([verb, *rest[:-1]])}",
            f"{rest[0]}_{rng.choice(('api', 'service', 'tool', 'manager'))}.{verb}",
            camel("_".join([verb, *rest])),
        )
    )


def _description(rng: random.Random, skill: Skill, shown: str, labels: list[str]) -> str:
    verb = rng.choice(skill.verbs)
    first, *others = verb.split()
    third = " ".join([first + ("es" if first.endswith(("ch", "sh", "x", "ss")) else "s"), *others])
    given = " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
    return rng.choice(
        (
            f"{verb.capitalize()} {shown}.",
            f"{third.capitalize()} {shown}",
            f"{verb.capitalize()} {shown} given {given}.",
            f"{verb.capitalize()} {shown} based on the {given}.",
            f"This function can be used to {verb} {shown}.",
            f"{third.capitalize()} {shown}, using the {labels[0]} and other details that are given.",
            f"A tool to {verb} {shown}. It needs the {labels[0]}.",
        )
    )


def _property(rng: random.Random, parameter: Parameter, field: Field, shown: str) -> dict[str, Any]:
    words = parameter.label
    noun = shown if shown.split()[0] in ("the", "a", "an") else "the request"
    text = rng.choice(
        (
            f"The {words}",
            f"The {words}",
            f"{words.capitalize()}",
            f"The {words} of {noun}",
            f"The {words} for {noun}",
            f"Specifies the {words}",
            f"The {words} to use",
        )
    )
    if parameter.kind in _DESCRIBED and rng.random() < 0.4:
        text = rng.choice(_DESCRIBED[parameter.kind]).format(words)
    if parameter.kind == "flag":
        text = rng.choice(
            (f"Whether to use {words}", f"If true, {words}", f"{words.capitalize()} or not", f"Flag for {words}")
        )
    if field.note:
        text += rng.choice((f", {field.note}", f" ({field.note})", f" {field.note}"))
    made = {**field.schema, "description": text + rng.choice((".", ".", ""))}
    if not parameter.required and rng.random() < 0.6:
        default = False if parameter.kind == "flag" and rng.random() < 0.7 else field.draw(rng).value
        style = rng.choice(("text", "text", "optional", "key"))
        if style == "key":
            made["default"] = default
        else:
            note = f"Default is {default}" if style == "text" else rng.choice(("Optional", "This is optional"))
            made["description"] = made["description"].rstrip(".") + f". {note}."
    return made
