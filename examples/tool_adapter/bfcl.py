"""Berkeley's function-calling leaderboard, single calls: its cases, read from its package, and when a call is right.

The rules are those of `bfcl_eval`'s checker of syntax trees (Python): a value of the declared type among the possible answers,
strings without case, spaces and some punctuation, an optional parameter left out only where the answers allow it. One bound of
that checker is kept: within arrays types are compared one level deep.
"""

import json
import random
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_PYTHON = {
    "string": str,
    "integer": int,
    "float": float,
    "number": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "object": dict,
    "any": str,
}
_IGNORED = re.compile(r"[ ,./\-_*^]")


class Case(NamedTuple):
    """A question and what answers it.

    Attributes:
        messages: OpenAI-style.
        functions: as the package declares them.
        answer: by the function's name the possible values of its parameters; None if no function fits.
    """

    name: str
    messages: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    answer: Mapping[str, Mapping[str, list[Any]]] | None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions as OpenAI declares them, with JSON's types."""
        return [{"type": "function", "function": _with_json_types(function)} for function in self.functions]


def read_cases(package: Path, category: str, count: int, seed: int) -> list[Case]:
    """Cases of a category by chance: `simple_python`, `multiple`, `irrelevance`.

    Args:
        package: the wheel, or a directory that has `bfcl_eval/data`.

    Raises:
        ConfigError: the category is not there.
    """
    lines = _read(package, f"BFCL_v4_{category}.json")
    if lines is None:
        raise ConfigError("no such cases", got=f"{category} in {package}", fix="give bfcl_eval's wheel, unchanged")
    answers = {
        answer["id"]: answer["ground_truth"][0]
        for answer in _read(package, f"possible_answer/BFCL_v4_{category}.json") or ()
    }
    chosen = random.Random(seed).sample(lines, min(count, len(lines)))
    return [Case(line["id"], line["question"][0], line["function"], answers.get(line["id"])) for line in chosen]


def _read(package: Path, name: str) -> list[dict[str, Any]] | None:
    name = f"bfcl_eval/data/{name}"
    if package.is_dir():
        return _lines((package / name).read_text(encoding="utf-8")) if (package / name).is_file() else None
    with zipfile.ZipFile(package) as archive:
        return _lines(archive.read(name).decode()) if name in archive.namelist() else None


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _with_json_types(value: Any) -> Any:
    """A declaration with the types that JSON schemas have."""
    if isinstance(value, list):
        return [_with_json_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _with_json_types(item) for key, item in value.items()}
    if isinstance(value.get("type"), str):
        made["type"] = _TYPES.get(value["type"], value["type"])
    return made


def is_right(case: Case, calls: Sequence[tuple[str, Any]]) -> bool:
    """Whether these calls, names and arguments, are what the case wants."""
    if case.answer is None or len(calls) != 1:
        return case.answer is None and not calls
    ((name, arguments),) = calls
    ((function, possible),) = case.answer.items()
    if name != function or not isinstance(arguments, dict):
        return False
    declared = next(item["parameters"] for item in case.functions if item["name"] == function)
    optional = {parameter for parameter, values in possible.items() if "" in values}
    needed = {*declared["required"], *(possible.keys() - optional)}
    return needed <= arguments.keys() <= (declared["properties"].keys() & possible.keys()) and all(
        _fits(value, declared["properties"][parameter], possible[parameter]) for parameter, value in arguments.items()
    )


def _fits(value: Any, declared: Mapping[str, Any], possible: list[Any]) -> bool:
    kind = declared["type"]
    expected = _PYTHON[kind]
    if expected is float and type(value) is int:
        value = float(value)
    answer_type = next((type(answer) for answer in possible if answer != ""), None)
    is_variable = answer_type is not None and answer_type is not expected
    if type(value) is not expected:
        if type(value) is not answer_type:
            return False
        is_variable = True
    elif kind in ("array", "tuple") and not _items_fit(value, _PYTHON[declared["items"]["type"]], possible):
        return False
    if is_variable:
        return value in possible
    if expected is dict:
        return any(_is_record(value, answer) for answer in possible if answer != "")
    if expected is list and _PYTHON[declared["items"]["type"]] is dict:
        return any(_are_records(value, answer) for answer in possible if answer != "")
    if expected in (str, list):
        return _plain(value) in [_plain(answer) for answer in possible if isinstance(answer, expected)]
    return value in possible


def _items_fit(values: list[Any], kind: type, possible: list[Any]) -> bool:
    """Whether the items have the type, or that of the items of a possible answer."""
    for answer in possible:
        if not isinstance(answer, list):
            return True
        other = next((type(item) for item in answer if item != ""), None)
        if all(type(value) is kind or type(value) is other for value in values):
            return True
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _IGNORED.sub("", value).lower().replace("'", '"')
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _is_record(value: Any, answer: Mapping[str, list[Any]]) -> bool:
    if not isinstance(value, dict) or not isinstance(answer, Mapping):
        return False
    for key, item in value.items():
        plain = _plain(item) if isinstance(item, str) else item
        if key not in answer or plain not in [
            _plain(other) if isinstance(other, str) else other for other in answer[key]
        ]:
            return False
    return all(key in value or "" in values for key, values in answer.items())


def _are_records(values: list[Any], answer: Any) -> bool:
    return (
        isinstance(answer, list)
        and len(values) == len(answer)
        and all(_is_record(value, other) for value, other in zip(values, answer, strict=True))
    )
