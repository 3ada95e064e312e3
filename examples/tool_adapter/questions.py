"""Questions: what a request of a tool looks like in words, in many forms."""

import random
import re
from collections import Counter

from examples.tool_adapter.lexicon import UNITS
from examples.tool_adapter.skills import Parameter
from examples.tool_adapter.tools import Request
from examples.tool_adapter.values import Value

_ASKING = ("how", "what", "when", "whether", "which", "who", "if", "where")
_OPTIONAL = re.compile(r"\[(.*?)\]")
_PLACE = re.compile(r"\{(\w+)\}")
_OF = ("of", "with", "at", "")
_ANYWHERE = {
    **dict.fromkeys(UNITS, _OF),
    "money": ("of", "for", "with", ""),
    "percent": ("at", "of", "with"),
    "city": ("in", "for", "near"),
    "country": ("in", "for"),
    "date": ("on", "for", ""),
    "time": ("at",),
    "person": ("for", "by", "with"),
    "company": ("for", "of", "at"),
    "language": ("in",),
    "email": ("to", "for"),
    "colour": ("in",),
    "numbers": ("of", "for", ""),
    "year": ("in", "for", "of"),
    "sentence": ("", "that says"),
    "title": ("", "called", "titled"),
    "code": ("", "with"),
    "sport": ("for", "in"),
    "topic": ("on", "about"),
}
"""By kind words before values that say what they are themselves."""
_LEADS = (
    "I'm working on something.",
    "I have a question.",
    "Hi!",
    "Hello,",
    "Quick one:",
    "I am planning my week.",
    "For my homework:",
    "My boss asked me about this.",
    "We are preparing a trip.",
)


def question(rng: random.Random, request: Request) -> str:
    """A request in words."""
    skill = request.tool.skill
    if skill.phrases and rng.random() < 0.5 and (text := _phrase(rng, request, rng.choice(skill.phrases))):
        return text
    verb, shown = rng.choice(skill.verbs), rng.choice(skill.objects)
    items = list(request.written.items())
    if rng.random() < 0.3:
        rng.shuffle(items)
    parameters = _parameters(request)
    asks = shown.split()[0] in _ASKING
    what = f"{verb} {shown}"
    if asks:
        verb = rng.choice(("tell me", "find out", "work out", "check"))
        what = f"{verb} {shown}"
    style = rng.random()
    if style < 0.14 and items:
        text = _conditional(rng, parameters, items, shown, what, asks)
    elif style < 0.2 and items:
        listed = ", ".join(
            f"{parameters[name].label}{rng.choice((' ', ': ', ' = '))}{_text(value)}" for name, value in items
        )
        text = rng.choice((f"{what}: {listed}", f"{what} with {listed}.", f"{what} ({listed})"))
    else:
        text = _plain(
            rng, what, shown, asks, _joined(rng, [_clause(rng, parameters[name], value) for name, value in items])
        )
    text = " ".join(text.replace(" .", ".").replace(" ?", "?").replace(" ,", ",").split())
    if rng.random() < 0.9:
        text = text[:1].upper() + text[1:]
    return f"{rng.choice(_LEADS)} {text}" if rng.random() < 0.06 else text


def _phrase(rng: random.Random, request: Request, phrase: str) -> str:
    """A phrase of the skill with the request's values, and clauses for what it has no place for; "" if it does not fit."""
    by_skill = dict(zip((p.name for p in request.tool.skill.parameters), request.tool.parameters, strict=True))
    told = {name: request.written[p.name] for name, p in by_skill.items() if p.name in request.written}
    placed = set[str]()

    def optional(match: re.Match[str]) -> str:
        names = _PLACE.findall(match[1])
        if all(name in told and told[name].value is not False for name in names):
            return match[1]
        return ""

    text = _OPTIONAL.sub(optional, phrase)
    for name in _PLACE.findall(text):
        if name not in told:
            return ""
        placed.add(name)
        text = text.replace(f"{{{name}}}", told[name].written)
    text = " ".join(text.split())
    others = [_clause(rng, p, told[name]) for name, p in by_skill.items() if name in told and name not in placed]
    if others:
        text = f"{text.rstrip('.?')} {_joined(rng, others)}{text[-1] if text[-1] in '.?' else ''}"
    return text[:1].upper() + text[1:] if rng.random() < 0.9 else text


def rest(rng: random.Random, request: Request) -> str:
    """What a request tells of its parameters, without what is asked."""
    parameters = _parameters(request)
    return _joined(rng, [_clause(rng, parameters[name], value) for name, value in request.written.items()])


def _parameters(request: Request) -> dict[str, Parameter]:
    """By name; one that is alone of its kind, and whose values say what they are, may stand behind any small word."""
    parameters = request.tool.parameters
    kinds = Counter(parameter.kind for parameter in parameters)
    return {
        p.name: p._replace(before=_ANYWHERE[p.kind])
        if not p.before and p.kind in _ANYWHERE and kinds[p.kind] == 1
        else p
        for p in parameters
    }


def _plain(rng: random.Random, what: str, shown: str, asks: bool, clauses: str) -> str:
    forms = [
        f"{what} {clauses}.",
        f"{what} {clauses}.",
        f"Can you {what} {clauses}?",
        f"Could you please {what} {clauses}?",
        f"Please {what} {clauses}.",
        f"I need to {what} {clauses}." if not asks else f"I need to know {shown} {clauses}.",
        f"I want you to {what} {clauses}",
        f"Help me {what} {clauses}.",
        f"I'd like to {what} {clauses}." if not asks else f"I'd like to know {shown} {clauses}.",
    ]
    if shown.startswith("the "):
        forms += [
            f"What is {shown} {clauses}?",
            f"What's {shown} {clauses}?",
            f"Tell me {shown} {clauses}.",
            f"I need {shown} {clauses}.",
        ]
    elif asks:
        forms += [f"Do you know {shown} {clauses}?", f"{shown} {clauses}?", f"I want to know {shown} {clauses}."]
    elif not shown.startswith("to "):
        forms += [f"I am looking for {shown} {clauses}.", f"I need {shown} {clauses}."]
    return rng.choice(forms)


def _conditional(
    rng: random.Random,
    parameters: dict[str, Parameter],
    items: list[tuple[str, Value]],
    shown: str,
    what: str,
    asks: bool,
) -> str:
    """The values first, then what is asked."""
    facts = []
    for name, value in items:
        words = parameters[name].label
        if parameters[name].kind == "flag":
            facts.append(f"{words} is {'on' if value.value else 'off'}")
        else:
            facts.append(
                rng.choice(
                    (f"the {words} is {_text(value)}", f"my {words} is {_text(value)}", f"{words} = {_text(value)}")
                )
            )
    joined = _joined(rng, facts, ", ")
    query = f"what is {shown}" if shown.startswith("the ") else f"can you {what}"
    return rng.choice(
        (
            f"If {joined}, {query}?",
            f"Given that {joined}, {what}.",
            f"{joined.capitalize() if joined[0].islower() and rng.random() < 0.5 else joined}. {what.capitalize()}.",
            f"Suppose {joined}. {query.capitalize()}?",
        )
    )


def _joined(rng: random.Random, clauses: list[str], between: str | None = None) -> str:
    if len(clauses) > 1 and rng.random() < 0.55:
        return f"{(between or rng.choice((', ', ' '))).join(clauses[:-1])} and {clauses[-1]}"
    return (between or rng.choice((" ", ", "))).join(clauses)


def _text(value: Value) -> str:
    return value.written or str(value.value).lower()


def _clause(rng: random.Random, parameter: Parameter, value: Value) -> str:
    words, text = parameter.label, value.written
    if parameter.kind == "flag":
        return _flag(rng, words, bool(value.value))
    if parameter.before and rng.random() < 0.7:
        return f"{rng.choice(parameter.before)} {text}"
    return rng.choice(
        (
            f"with {words} {text}",
            f"with a {words} of {text}",
            f"with a {words} of {text}",
            f"where the {words} is {text}",
            f"whose {words} is {text}",
            f"{words} {text}",
            f"using {text} as the {words}",
            f"with {text} as {words}",
            f"the {words} should be {text}",
            f"for a {words} of {text}",
        )
    )


def _flag(rng: random.Random, words: str, is_on: bool) -> str:
    first, _, others = words.partition(" ")
    if first == "include":
        return rng.choice(
            (f"including {others}", f"and include {others}") if is_on else (f"without {others}", f"excluding {others}")
        )
    if first in ("avoid", "keep", "notify", "refund", "accepts", "has"):
        return rng.choice((f"and {words}", f"it should {words}") if is_on else (f"do not {words}", f"without {words}"))
    if words.endswith(" only"):
        return f"only {words.removesuffix(' only')}" if is_on else f"not only {words.removesuffix(' only')}"
    if is_on:
        return rng.choice(
            (f"with {words}", f"with {words} set to true", f"with {words} enabled", f"{words}", f"it should be {words}")
        )
    return rng.choice((f"not {words}", f"with {words} set to false", f"without {words}", f"with {words} disabled"))
