"""Values that tools take: kinds of them, their JSON schemas, and how people write them in a question.

A kind is a name in the tables of `lexicon.py`, or below. A tool makes a `Field` of it: a type, a unit and choices stay the same
in all that is asked of the tool. Words come from lists, and from the vocabulary of the model's tokenizer (`Lexicon`), so that
what is copied from a question into a call is seldom the same twice.
"""

import calendar
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from examples.tool_adapter.lexicon import ENUMS, LISTS, PLACES, UNITS, Lexicon, listed

_RANGES = {
    "temperature": (1, 120),
    "angle": (1, 180),
    "frequency": (20, 2000),
    "voltage": (1, 240),
    "duration": (1, 90),
}
_SENTENCES = listed(
    "I will be late today|The report is ready|Please call me back|The meeting moved to noon|Where is the train station|"
    "Thanks for your help|The package has arrived|We need more time|Good morning, how are you?|Dinner is at eight|"
    "The weather is lovely|Don't forget the keys|I love this song|The server is down again",
    "|",
)
_NUMBER_WORDS = listed("zero one two three four five six seven eight nine ten eleven twelve")


class Value(NamedTuple):
    """A value, and how a question writes it."""

    value: Any
    written: str


class Field(NamedTuple):
    """A kind as one tool has it.

    Attributes:
        schema: without a description.
        note: what a description may add: a unit, a form, an example.
        draw: a value, of a generator.
        label: what the value is called in a question if it says so itself ("10 meters"), else "".
    """

    schema: Mapping[str, Any]
    note: str
    draw: Callable[[random.Random], Value]


def field(kind: str, rng: random.Random, lexicon: Lexicon) -> Field:
    """A kind as one tool takes it; every tool another type, unit or choice of words."""
    if kind in UNITS:
        return _quantity(rng, UNITS[kind].split(), *_RANGES.get(kind, (1, 400)))
    if kind in ENUMS:
        return _choice(rng, _words(ENUMS[kind]))
    if kind in LISTS:
        return _open(rng, _words(LISTS[kind]))
    match kind:
        case "count":
            return Field({"type": "integer"}, "", _whole(1, rng.choice((12, 30, 100))))
        case "stars":
            return Field({"type": "integer"}, rng.choice(("", "from 1 to 5")), _whole(1, 5))
        case "year":
            if rng.random() < 0.2:
                return Field({"type": "string"}, "", lambda rng: _same(str(rng.randint(1850, 2025))))
            return Field({"type": "integer"}, "", lambda rng: _same(rng.randint(1850, 2025)))
        case "number":
            return _quantity(rng, [""], 1, 500)
        case "money":
            return _money(rng)
        case "percent" | "rate":
            return _percent(rng)
        case "flag":
            return Field({"type": "boolean"}, "", lambda rng: Value(True, ""))
        case "numbers":
            kind = rng.choice(("integer", "integer", "number"))
            return Field({"type": "array", "items": {"type": kind}}, "", _numbers(kind))
        case "date":
            return _date(rng)
        case "time":
            return Field({"type": "string"}, rng.choice(("", "in 24-hour format")), _time)
        case "record":
            return _record(rng, lexicon)
        case "code":
            pattern = rng.choice(("AA-9999", "AAA999", "9999999", "A99-99A", "AAAA", "aa_9999", "999-99"))
            return Field({"type": "string"}, "", lambda rng: _same(_formatted(pattern, rng)))
        case "ticker":
            return Field({"type": "string"}, "", lambda rng: _same(_formatted("AAAA"[: rng.randint(3, 4)], rng)))
        case "sentence":
            return Field({"type": "string"}, "", lambda rng: _quoted(rng, rng.choice(_SENTENCES)))
    if kind.endswith("s") and (kind[:-1] in ENUMS or kind[:-1] in LISTS or kind[:-1] in _NAMED):
        return _several(field(kind[:-1], rng, lexicon))
    draw = _NAMED[kind]
    notes = {"city": ("", "", "e.g. {}", "city and state", "such as {}"), "person": ("", "", "full name")}
    note = rng.choice(notes.get(kind, ("", "", "", "e.g. {}"))).format(draw(rng, lexicon).written.strip("'\""))
    return Field({"type": "string"}, note, lambda rng: draw(rng, lexicon))


def _words(line: str) -> list[str]:
    return [word.replace("_", " ") for word in line.split()]


def _same(value: Any) -> Value:
    return Value(value, str(value))


def _number_text(number: float, rng: random.Random) -> str:
    if isinstance(number, int) and number < len(_NUMBER_WORDS) and rng.random() < 0.2:
        return _NUMBER_WORDS[number]
    if isinstance(number, int) and number >= 1000 and rng.random() < 0.4:
        return f"{number:,}"
    return str(number)


def _whole(low: int, high: int) -> Callable[[random.Random], Value]:
    def draw(rng: random.Random) -> Value:
        number = rng.randint(low, high)
        return Value(number, _number_text(number, rng))

    return draw


def _quantity(rng: random.Random, units: Sequence[str], low: int, high: int) -> Field:
    unit, whole = rng.choice(units).replace("_", " "), rng.random() < 0.6

    def draw(rng: random.Random) -> Value:
        top = rng.choice((12, 60, high, high * 20 if high >= 400 else high))
        number: float = rng.randint(low, max(top, low + 9))
        if not whole and rng.random() < 0.5:
            number = round(rng.uniform(low, top), rng.choice((1, 1, 2)))
        text = _number_text(number, rng)
        if not unit or rng.random() < 0.15:
            return Value(number, text)
        joined = "" if len(unit) < 3 and rng.random() < 0.5 and text[-1].isdigit() else " "
        return Value(number, f"{text}{joined}{unit}")

    note = f"in {unit}" if unit and rng.random() < 0.7 else ""
    return Field({"type": "integer" if whole else "number"}, note, draw)


def _money(rng: random.Random) -> Field:
    whole, currency = rng.random() < 0.6, rng.choice(("${}", "${}", "{} dollars", "{} euros", "{} USD", "{}"))

    def draw(rng: random.Random) -> Value:
        number: float = rng.randint(1, 99) * rng.choice((1, 10, 100, 1000, 5000))
        if not whole and rng.random() < 0.4:
            number = round(rng.uniform(1, 900), 2)
        text = f"{number:,}" if number >= 1000 and rng.random() < 0.4 else str(number)
        return Value(number, currency.format(text))

    return Field({"type": "integer" if whole else "number"}, rng.choice(("", "", "in dollars")), draw)


def _percent(rng: random.Random) -> Field:
    """A rate that is written in percent; the tool takes it as a fraction if its type is a number, unless it says percent."""
    fraction = rng.random() < 0.6

    def draw(rng: random.Random) -> Value:
        number = rng.randint(1, 40) if rng.random() < 0.6 else rng.randint(2, 150) / 10
        text = rng.choice((f"{number}%", f"{number}%", f"{number} percent"))
        return Value(round(number / 100, 4) if fraction else number, text)

    if fraction:
        return Field({"type": "number"}, rng.choice(("", "as a decimal", "as a decimal, e.g. 0.05")), draw)
    return Field({"type": "number"}, rng.choice(("in percent", "as a percentage")), draw)


def _choice(rng: random.Random, words: Sequence[str]) -> Field:
    offered = rng.sample(list(words), min(len(words), rng.randint(2, 6)))
    style = rng.choice((str, str, str.lower, lambda word: word.replace(" ", "_"), str.title))
    values = {word: style(word) for word in offered}

    def draw(rng: random.Random) -> Value:
        word = rng.choice(offered)
        return Value(values[word], word if rng.random() < 0.8 else f"'{word}'")

    if rng.random() < 0.7:
        return Field({"type": "string", "enum": list(values.values())}, "", draw)
    shown = ", ".join(f"'{value}'" for value in values.values())
    return Field(
        {"type": "string"}, f"one of {shown}" if rng.random() < 0.6 else f"e.g. {next(iter(values.values()))}", draw
    )


def _open(rng: random.Random, words: Sequence[str]) -> Field:
    def draw(rng: random.Random) -> Value:
        word = rng.choice(words)
        return Value(word, f"'{word}'" if rng.random() < 0.15 else word)

    return Field({"type": "string"}, f"e.g. {rng.choice(words)}" if rng.random() < 0.2 else "", draw)


def _several(single: Field) -> Field:
    def draw(rng: random.Random) -> Value:
        drawn = {value.value: value.written for value in (single.draw(rng) for _ in range(rng.choice((1, 2, 2, 3, 3))))}
        written = list(drawn.values())
        head = ", ".join(written[:-1])
        return Value(list(drawn), f"{head} and {written[-1]}" if head else written[0])

    return Field({"type": "array", "items": dict(single.schema)}, single.note, draw)


def _numbers(kind: str) -> Callable[[random.Random], Value]:
    def draw(rng: random.Random) -> Value:
        numbers: list[float] = [rng.randint(0, 99) for _ in range(rng.randint(2, 6))]
        if kind == "number" and rng.random() < 0.5:
            numbers = [round(rng.uniform(0, 50), 1) for _ in numbers]
        joined = ", ".join(map(str, numbers))
        return Value(numbers, rng.choice((f"[{joined}]", joined, " and ".join(joined.rsplit(", ", 1)))))

    return draw


def _date(rng: random.Random) -> Field:
    form = rng.choice(("iso", "iso", "us", "written", "free"))

    def draw(rng: random.Random) -> Value:
        year, month, day = rng.randint(1990, 2027), rng.randint(1, 12), rng.randint(1, 28)
        iso, us = f"{year}-{month:02}-{day:02}", f"{month:02}/{day:02}/{year}"
        long = f"{calendar.month_name[month]} {day}, {year}"
        value = {"iso": iso, "us": us, "written": long, "free": rng.choice((iso, long, us))}[form]
        if form == "free" or rng.random() < 0.65:
            return _same(value)
        return Value(value, rng.choice((long, long.replace(f" {day},", f" {day}th,") if 3 < day < 21 else long)))

    note = {
        "iso": "in the format YYYY-MM-DD",
        "us": "in MM/DD/YYYY format",
        "written": "e.g. March 5, 2024",
        "free": "",
    }
    return Field({"type": "string"}, note[form], draw)


def _time(rng: random.Random) -> Value:
    hour, minute = rng.randint(0, 23), rng.choice((0, 15, 30, 45))
    return _same(f"{hour:02}:{minute:02}")


def _record(rng: random.Random, lexicon: Lexicon) -> Field:
    """An object with two or three fields of its own."""
    kinds = {"name": "person", "city": "city", "age": "count", "email": "email", "price": "number", "color": "colour"}
    chosen = rng.sample(sorted(kinds), rng.randint(2, 3))
    parts = {name: field(kinds[name], rng, lexicon) for name in chosen}

    def draw(rng: random.Random) -> Value:
        drawn = {name: part.draw(rng) for name, part in parts.items()}
        link = rng.choice((" ", ": ", " of "))
        written = ", ".join(f"{name}{link}{value.written}" for name, value in drawn.items())
        return Value({name: value.value for name, value in drawn.items()}, written)

    properties = {name: dict(part.schema) for name, part in parts.items()}
    if rng.random() < 0.6:
        properties = {name: {**part, "description": f"The {name}."} for name, part in properties.items()}
    return Field({"type": "object", "properties": properties}, "", draw)


def _quoted(rng: random.Random, text: str) -> Value:
    return Value(text, rng.choice((f"'{text}'", f"'{text}'", f'"{text}"')))


def _formatted(pattern: str, rng: random.Random) -> str:
    """Letters for `A` and `a`, digits for `9`."""
    pools = {"A": "ABCDEFGHKMNPRSTX", "a": "bcdfgklmnprst", "9": "0123456789"}
    return "".join(rng.choice(pools[letter]) if letter in pools else letter for letter in pattern)


def _city(rng: random.Random, lexicon: Lexicon) -> Value:
    city, region = rng.choice(PLACES)
    return _same(city if rng.random() < 0.6 else f"{city}, {region}")


def _title(rng: random.Random, lexicon: Lexicon) -> Value:
    text = lexicon.title(rng)
    return Value(text, f"'{text}'" if rng.random() < 0.6 else text)


def _email(rng: random.Random, lexicon: Lexicon) -> Value:
    first = lexicon.person(rng).split()[0].lower()
    return _same(f"{first}@{lexicon.word(rng)}.{rng.choice(('com', 'org', 'io'))}")


def _url(rng: random.Random, lexicon: Lexicon) -> Value:
    return _same(f"https://www.{lexicon.word(rng)}.com/{lexicon.word(rng)}")


def _path(rng: random.Random, lexicon: Lexicon) -> Value:
    name = rng.choice(("notes.txt", "data.csv", "report.pdf", "photo.png", "main.py"))
    return _same(
        rng.choice(
            (f"/home/{lexicon.word(rng)}/{name}", f"{lexicon.word(rng)}_{name}", f"C:/{lexicon.word(rng)}/{name}")
        )
    )


def _address(rng: random.Random, lexicon: Lexicon) -> Value:
    return _same(f"{rng.randint(1, 999)} {lexicon.name(rng)} {rng.choice(('Street', 'Avenue', 'Road', 'Lane'))}")


def _word(rng: random.Random, lexicon: Lexicon) -> Value:
    text = lexicon.word(rng)
    return Value(text, f"'{text}'" if rng.random() < 0.4 else text)


_NAMED: dict[str, Callable[[random.Random, Lexicon], Value]] = {
    "city": _city,
    "country": lambda rng, lexicon: _same(lexicon.country(rng)),
    "person": lambda rng, lexicon: _same(lexicon.person(rng)),
    "company": lambda rng, lexicon: _same(lexicon.company(rng)),
    "place": lambda rng, lexicon: _same(lexicon.place(rng)),
    "name": lambda rng, lexicon: _same(lexicon.name(rng)),
    "title": _title,
    "word": _word,
    "email": _email,
    "url": _url,
    "path": _path,
    "address": _address,
}
