"""Dialogues about invented tools: declarations, questions of many forms, calls, results and answers; without an end.

A dialogue declares one to four tools. It asks for one of them, for several calls of them, for something that none of them does,
or leaves out what a tool needs to be told. What the agent writes is in the last message and in earlier ones of its own.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from examples.tool_adapter.skills import SKILLS, Parameter, Skill, Value, draw, schema

HELD_OUT = frozenset(skill.name for skill in SKILLS[::9])
"""Skills of no training dialogue: they examine what was learnt."""
_SMALL_TALK = (
    ("Hello, how are you?", "Hello! How can I help you?"),
    ("Thank you very much.", "You are welcome!"),
    ("Tell me a joke.", "Why did the computer go to the doctor? It had a virus."),
    (
        "Write a haiku about autumn.",
        "Leaves fall on still ground, a cold wind crosses the lake, the year bows its head.",
    ),
)


class Dialogue(NamedTuple):
    """A conversation with tools.

    Attributes:
        tools: OpenAI-style declarations.
        messages: OpenAI-style; the agent's have `tool_calls` or a text.
    """

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class _Tool(NamedTuple):
    """A skill as a dialogue declares it."""

    skill: Skill
    name: str
    parameters: tuple[Parameter, ...]  # under the names that the declaration has


class _Request(NamedTuple):
    """What is asked of a tool.

    Attributes:
        arguments: those that the question has, by name.
        written: how it writes them.
    """

    tool: _Tool
    arguments: dict[str, Any]
    written: dict[str, Value]


def dialogues(seed: int, *, examination: bool = False) -> Iterator[Dialogue]:
    """Dialogues without an end.

    Args:
        examination: about skills that are held out, else about the others.
    """
    rng = random.Random(f"{seed} {examination}")
    skills = [skill for skill in SKILLS if (skill.name in HELD_OUT) == examination]
    while True:
        (make,) = rng.choices((_single, _several, _declined, _incomplete, _continued), (50, 12, 22, 8, 8))
        yield make(rng, skills)


def _single(rng: random.Random, skills: list[Skill]) -> Dialogue:
    tools = _tools(rng, skills, rng.choice((1, 1, 2, 3, 4)))
    request = _request(rng, tools[0])
    return _dialogue(rng, tools, [_asked(rng, [request]), _calling([request])])


def _several(rng: random.Random, skills: list[Skill]) -> Dialogue:
    """Several calls in a turn, of one tool or of two."""
    tools = _tools(rng, skills, rng.choice((1, 2, 3)))
    chosen = tools[:2] if len(tools) > 1 and rng.random() < 0.5 else [tools[0]] * rng.choice((2, 2, 3))
    requests = [_request(rng, tool) for tool in chosen]
    return _dialogue(rng, tools, [_asked(rng, requests), _calling(requests)])


def _declined(rng: random.Random, skills: list[Skill]) -> Dialogue:
    """None of the tools does what is asked."""
    tools = _tools(rng, skills, rng.choice((1, 1, 2, 3)))
    if rng.random() < 0.25:
        question, answer = rng.choice(_SMALL_TALK)
    else:
        declared = {tool.skill.name for tool in tools}
        other = rng.choice([skill for skill in skills if skill.name not in declared])
        question = _question(rng, _request(rng, _declared(rng, other)))
        answer = rng.choice(
            (
                "None of the functions that I have can do that.",
                f"I am sorry, I have no function to {other.verbs[0]} {other.object}.",
                f"I cannot {other.verbs[0]} {other.object} with the functions that I have.",
            )
        )
    return _dialogue(rng, tools, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _incomplete(rng: random.Random, skills: list[Skill]) -> Dialogue:
    """Something that the tool needs is missing; the agent asks for it, and calls once it knows."""
    tools = _tools(rng, skills, rng.choice((1, 2)))
    request = _request(rng, tools[0])
    needed = [parameter.name for parameter in request.tool.parameters if parameter.required]
    missing = rng.choice(needed)
    shown = {name: value for name, value in request.written.items() if name != missing}
    label = missing.replace("_", " ")
    question = {"role": "user", "content": _question(rng, request._replace(written=shown))}
    back = {"role": "assistant", "content": rng.choice((f"What is the {label}?", f"Please tell me the {label}."))}
    told = {
        "role": "user",
        "content": rng.choice(("{}", "It is {}.", "{} please")).format(request.written[missing].written),
    }
    return _dialogue(rng, tools, [question, back, told, _calling([request])])


def _continued(rng: random.Random, skills: list[Skill]) -> Dialogue:
    """A result comes back and is read."""
    tools = _tools(rng, skills, rng.choice((1, 2)))
    request = _request(rng, tools[0])
    number = rng.randint(2, 999)
    key, value = rng.choice((("result", number), ("status", "ok"), ("value", number / 10), ("id", f"R-{number}")))
    result = {"role": "tool", "content": json.dumps({key: value})}
    answer = rng.choice((f"The {key} is {value}.", f"Done: the {key} is {value}.", f"I got the {key} {value}."))
    return _dialogue(
        rng, tools, [_asked(rng, [request]), _calling([request]), result, {"role": "assistant", "content": answer}]
    )


def _dialogue(rng: random.Random, tools: list[_Tool], messages: list[dict[str, Any]]) -> Dialogue:
    rng.shuffle(tools)
    return Dialogue([_declaration(rng, tool) for tool in tools], messages)


def _tools(rng: random.Random, skills: list[Skill], count: int) -> list[_Tool]:
    """Tools of different skills; the first is the one that is asked for."""
    first, *others = rng.sample(skills, count)
    related = [skill for skill in skills if skill != first and skill.object.split()[-1] == first.object.split()[-1]]
    if related and others and rng.random() < 0.5:
        others[0] = rng.choice(related)
    return [_declared(rng, skill) for skill in dict.fromkeys((first, *others))]


def _declared(rng: random.Random, skill: Skill) -> _Tool:
    words = skill.name.split("_")
    verb = rng.choice(skill.verbs).split()[0]
    name = rng.choice(
        (
            skill.name,
            "_".join([verb, *(word for word in words if word != verb)]),
            words[-1] + "." + "_".join([verb, *words[:-1]]),
            verb + "".join(word.title() for word in words if word != verb),
        )
    )
    renamed = {"city": ("location", "city_name"), "date": ("day", "on_date"), "count": ("num", "limit")}

    def parameter_name(parameter: Parameter) -> str:
        others = renamed.get(parameter.name, ())
        return rng.choice(others) if others and rng.random() < 0.3 else parameter.name

    parameters = tuple(parameter._replace(name=parameter_name(parameter)) for parameter in skill.parameters)
    return _Tool(skill, name, parameters)


def _declaration(rng: random.Random, tool: _Tool) -> dict[str, Any]:
    skill, verb = tool.skill, rng.choice(tool.skill.verbs)
    properties = {}
    for parameter in tool.parameters:
        label = parameter.name.replace("_", " ")
        described = rng.choice((f"The {label}.", f"The {label} of {skill.object}.", f"{label.capitalize()}"))
        properties[parameter.name] = schema(parameter.kind) | {"description": described}
    required = [parameter.name for parameter in tool.parameters if parameter.required]
    description = rng.choice((f"{verb.capitalize()} {skill.object}.", f"{verb.capitalize()}s {skill.object}"))
    body = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool.name, "description": description, "parameters": body}}


def _request(rng: random.Random, tool: _Tool) -> _Request:
    """A request with all that the tool needs, and some of what it may be told."""
    told = [parameter for parameter in tool.parameters if parameter.required or rng.random() < 0.4]
    written = {parameter.name: draw(parameter.kind, rng) for parameter in told}
    return _Request(tool, {name: value.value for name, value in written.items()}, written)


def _asked(rng: random.Random, requests: list[_Request]) -> dict[str, Any]:
    questions = [_question(rng, request) for request in requests]
    if len({request.tool.name for request in requests}) == 1 and len(requests) > 1:
        rests = [_clauses(rng, request) for request in requests]
        first = requests[0].tool.skill
        questions = [f"{rng.choice(first.verbs).capitalize()} {first.object} {', and also '.join(rests)}."]
    return {"role": "user", "content": rng.choice((" ", " Also, ", " Then ")).join(questions)}


def _question(rng: random.Random, request: _Request) -> str:
    skill, rest = request.tool.skill, _clauses(rng, request)
    verb = rng.choice(skill.verbs)
    forms = (
        f"{verb.capitalize()} {skill.object} {rest}.",
        f"Can you {verb} {skill.object} {rest}?",
        f"Please {verb} {skill.object} {rest}.",
        f"I need to {verb} {skill.object} {rest}.",
        f"What is {skill.object} {rest}?"
        if verb in ("calculate", "compute", "find", "get")
        else f"{verb} {skill.object} {rest}",
        f"I want you to {verb} {skill.object} {rest}",
    )
    return " ".join(rng.choice(forms).replace(" .", ".").replace(" ?", "?").split())


def _clauses(rng: random.Random, request: _Request) -> str:
    kinds = {parameter.name: parameter.kind for parameter in request.tool.parameters}
    clauses = [_clause(rng, name, kinds[name], value) for name, value in request.written.items()]
    if len(clauses) > 1 and rng.random() < 0.5:
        return f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return rng.choice((" ", ", ")).join(clauses)


def _clause(rng: random.Random, name: str, kind: str, value: Value) -> str:
    label, text = name.replace("_", " "), value.written
    usual = {
        "city": (f"in {text}", f"for {text}"),
        "country": (f"in {text}", f"for {text}", f"of {text}"),
        "date": (f"on {text}", f"for {text}"),
        "time": (f"at {text}",),
        "unit": (f"in {text}",),
        "language": (f"in {text}",) if name == "language" else (),
        "email": (f"for {text}", f"to {text}") if name in ("to", "email") else (),
    }.get(kind, ())
    special = {"origin": f"from {text}", "source": f"from {text}", "destination": f"to {text}", "target": f"to {text}"}
    if name in special and rng.random() < 0.8:
        return special[name]
    if kind == "flag":
        return rng.choice((f"with {label} set to true", f"with {label}", f"({label}: true)"))
    if usual and rng.random() < 0.8:
        return rng.choice(usual)
    forms = (f"with {label} {text}", f"with a {label} of {text}", f"where the {label} is {text}", f"{label} {text}")
    return rng.choice(forms)


def _calling(requests: list[_Request]) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": request.tool.name, "arguments": json.dumps(request.arguments)},
        }
        for number, request in enumerate(requests)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}
