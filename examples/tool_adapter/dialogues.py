"""Lessons: dialogues about the same invented tools, without an end.

A lesson declares one to four tools. Its dialogues ask for one of them, for several calls, for something that none of them does,
or leave out what a tool needs to be told. What the agent writes is in the last message and in earlier ones of its own.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from examples.tool_adapter.lexicon import Lexicon, listed
from examples.tool_adapter.questions import question, rest
from examples.tool_adapter.skills import SKILLS, Skill, made_up
from examples.tool_adapter.tools import Request, Tool, declare, request

HELD_OUT = frozenset(skill.name for skill in SKILLS[::9])
"""Skills of no training dialogue: they examine what was learnt."""
NONE_FITS = "None of the functions that I have can do that."
"""What the agent says where it may not call."""
_SMALL_TALK = (
    ("Hello, how are you?", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Thank you very much.", "You are welcome!"),
    ("Thanks, that is all.", "You are welcome!"),
    ("Tell me a joke.", "Why did the computer go to the doctor? It had a virus."),
    (
        "Write a haiku about autumn.",
        "Leaves fall on still ground, a cold wind crosses the lake, the year bows its head.",
    ),
    ("Who are you?", "I am an assistant that can call functions for you."),
)
_GENERAL = listed(
    "Who wrote {title}?|What is the meaning of life?|What is the highest {word} in {country}?|Who invented the {word}?|"
    "How do I clean a {word}?|What should I wear today in {city}?|Why is the {word} so important?|How old is {person}?|"
    "What are the benefits of {word}?|Which {word} is the best for me?|How tall is the tower in {city}?|Who is {person}?|"
    "Can you explain how a {word} works?|What is the color of a {word}?|How many {word}s are there in {country}?|"
    "What happened in {city} last year?|Is it safe to eat {word}?|Who won the {word} cup in {country}?|"
    "What is the best time to visit {country}?|What is the longest river in {country}?|Who is the mayor of {city}?|"
    "How did {person} become famous?|What is the difference between {word} and {word}?|Draw me a picture of a {word}.|"
    "Solve 3x + {number} = 20.|What is {number} times {number}?|What is the square root of {number}?|"
    "What is the name of the main character in {title}?|How long does it take to learn {word}?|What is {company} known for?",
    "|",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "Answer briefly.",
    "Use the functions if they help.",
)


class Dialogue(NamedTuple):
    """A conversation with tools.

    Attributes:
        tools: OpenAI-style declarations.
        messages: OpenAI-style; the agent's have `tool_calls` or a text.
    """

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class Mix(NamedTuple):
    """How often dialogues of the kinds come, relatively; and how often skills are made up of words by chance."""

    single: float = 60
    several: float = 7
    declined: float = 28
    incomplete: float = 3
    continued: float = 5
    made_up: float = 0.4


def lessons(
    lexicon: Lexicon, seed: int, *, examination: bool = False, num_dialogues: int = 7, mix: Mix | None = None
) -> Iterator[list[Dialogue]]:
    """Dialogues about the same tools, without an end.

    Args:
        examination: about skills that are held out, else about the others.
        num_dialogues: of a lesson.
    """
    rng, mix = random.Random(f"{seed} {examination}"), mix or Mix()
    skills = [skill for skill in SKILLS if (skill.name in HELD_OUT) == examination]
    author = _Author(rng, lexicon, skills, mix)
    while True:
        yield author.lesson(num_dialogues)


class _Author(NamedTuple):
    """Writes lessons."""

    rng: random.Random
    lexicon: Lexicon
    skills: list[Skill]
    mix: Mix

    def lesson(self, num_dialogues: int) -> list[Dialogue]:
        rng = self.rng
        tools = self._tools(rng.choices((1, 2, 3, 4), (50, 18, 18, 14))[0])
        declared = [tool.declaration for tool in tools]
        rng.shuffle(declared)
        system = [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.25 else []
        declined = self.mix.declined * (1.2 if len(tools) == 1 else 0.8)
        weights = (self.mix.single, self.mix.several, declined, self.mix.incomplete, self.mix.continued)
        makers = rng.choices(
            (self._single, self._several, self._declined, self._incomplete, self._continued), weights, k=num_dialogues
        )
        return [Dialogue(declared, [*system, *make(tools)]) for make in makers]

    def _skill(self) -> Skill:
        return made_up(self.rng, self.lexicon) if self.rng.random() < self.mix.made_up else self.rng.choice(self.skills)

    def _tools(self, count: int) -> list[Tool]:
        """Tools of different names; some of them are alike."""
        skills = [self._skill()]
        while len(skills) < count:
            near = self._near(self.rng.choice(skills))
            skill = near if near is not None and self.rng.random() < 0.4 else self._skill()
            if skill.name not in {other.name for other in skills}:
                skills.append(skill)
        return [declare(self.rng, self.lexicon, skill) for skill in skills]

    def _near(self, skill: Skill) -> Skill | None:
        """A skill that is easily taken for this one, but is another; None if there is none."""
        if skill not in self.skills:  # made up: other words with the same verbs or parameters
            other = made_up(self.rng, self.lexicon)
            return other._replace(**self.rng.choice(({"verbs": skill.verbs}, {"parameters": skill.parameters})))
        kinds = {parameter.kind for parameter in skill.parameters}
        near = [
            other
            for other in self.skills
            if other != skill
            and (
                other.name.split("_")[-1] == skill.name.split("_")[-1]
                or len(kinds & {parameter.kind for parameter in other.parameters}) > 1
            )
        ]
        return self.rng.choice(near) if near else None

    def _single(self, tools: list[Tool]) -> list[dict[str, Any]]:
        wanted = request(self.rng, self.rng.choice(tools))
        return [_user(question(self.rng, wanted)), _calling([wanted])]

    def _several(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """Several calls in a turn, of one tool or of two."""
        rng = self.rng
        chosen = (
            rng.sample(tools, 2)
            if len(tools) > 1 and rng.random() < 0.5
            else [rng.choice(tools)] * rng.choice((2, 2, 3))
        )
        requests = [request(rng, tool) for tool in chosen]
        if requests[0].tool.name == requests[1].tool.name:
            skill = requests[0].tool.skill
            rests = rng.choice((", and also ", " and ", "; then ")).join(rest(rng, wanted) for wanted in requests)
            return [
                _user(f"{rng.choice(skill.verbs).capitalize()} {rng.choice(skill.objects)} {rests}."),
                _calling(requests),
            ]
        return [
            _user(rng.choice((" ", " Also, ", " Then ")).join(question(rng, wanted) for wanted in requests)),
            _calling(requests),
        ]

    def _declined(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """None of the tools does what is asked."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.06:
            text, answer = rng.choice(_SMALL_TALK)
            return [_user(text), _said(answer)]
        if kind < 0.3:
            return [_user(self._general()), _said(NONE_FITS)]
        declared = {tool.skill.name for tool in tools}
        other = self._near(rng.choice(tools).skill) if rng.random() < 0.55 else self._skill()
        while other is None or other.name in declared:
            other = self._skill()
        return [_user(question(rng, request(rng, declare(rng, self.lexicon, other)))), _said(NONE_FITS)]

    def _general(self) -> str:
        rng, lexicon = self.rng, self.lexicon
        return rng.choice(_GENERAL).format(
            title=lexicon.title(rng),
            word=lexicon.word(rng),
            country=lexicon.country(rng),
            city=lexicon.name(rng),
            person=lexicon.person(rng),
            company=lexicon.company(rng),
            number=rng.randint(2, 900),
        )

    def _incomplete(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """Something that the tool needs is missing; the agent asks for it, and calls once it knows."""
        rng = self.rng
        wanted = request(rng, rng.choice(tools))
        needed = [p.name for p in wanted.tool.parameters if p.required and p.kind != "flag"]
        if not needed:
            return self._single(tools)
        missing = rng.choice(needed)
        words = next(p.label for p in wanted.tool.parameters if p.name == missing)
        shown = Request(wanted.tool, {name: value for name, value in wanted.written.items() if name != missing})
        back = f"What is the {words}?"
        told = rng.choice(("{}", "It is {}.", "{} please")).format(wanted.written[missing].written)
        return [_user(question(rng, shown)), _said(back), _user(told), _calling([wanted])]

    def _continued(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """A result comes back and is read."""
        rng = self.rng
        number = rng.randint(2, 999)
        key, value = rng.choice((("result", number), ("status", "ok"), ("value", number / 10), ("id", f"R-{number}")))
        answer = rng.choice((f"The {key} is {value}.", f"Done: the {key} is {value}."))
        result = {"role": "tool", "content": json.dumps({key: value})}
        return [*self._single(tools), result, _said(answer)]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _calling(requests: list[Request]) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": wanted.tool.name, "arguments": json.dumps(wanted.arguments)},
        }
        for number, wanted in enumerate(requests)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}
