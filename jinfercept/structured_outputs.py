"""The form of a request's text: a JSON schema, any JSON object, a regular expression, a list of choices, or a grammar.

Checks how it is given; compiles nothing and imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jinfercept.errors import RequestError, shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")

JSON_SPACE = r" |\n[ \t]{0,20}"
"""White space between the parts of a JSON value. Without a bound small models write blanks until they are cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the generated text must match, from its first token to its end. Names as in vLLM; exactly one is given.

    Tokens that tools return do not belong to that text: a call may pause it anywhere, and it continues afterwards. A model
    that should call while it is constrained needs a form that allows the call's own text, such as `start: ("<now>" "</now>")?
    answer`. If a call ends the matched text, or is found at an end-of-text token (as in the models' own formats), the text
    begins anew after it. A grammar then describes one turn: `start: calls | answer`.

    Attributes:
        json: a JSON schema, as text or as `json.loads` returns it. `oneOf` is taken as `anyOf`; annotations and formats that
            JSON Schema does not know are left out. White space between the parts of a value is at most a blank, or a new line
            and twenty blanks or tabs, so that no model writes it for ever.
        json_object: any JSON object.
        regex: a regular expression for the whole text, in the Rust crate's syntax: no look-around, no back-references.
        choice: texts, of which the output is one.
        grammar: in llguidance's variant of Lark (`start: …`), or GBNF (`root ::= …`).

    Raises:
        RequestError: none is given, several are, or one is of the wrong kind. Their content is checked when they are
            compiled.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(kinds) != 1:
            raise RequestError(
                "structured outputs take exactly one kind of constraint",
                got=", ".join(kinds) or "none",
                fix=f"give one of {', '.join(KINDS)}",
            )
        self._check(kinds[0], getattr(self, kinds[0]))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))

    def _check(self, kind: str, value: object) -> None:
        match kind:
            case "json":
                good, fix = isinstance(value, str | Mapping), "give a JSON schema as text or as a dict"
            case "json_object":
                good, fix = value is True, "True, or leave it out"
            case "choice":
                good = isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
                good, fix = good and bool(value), "give a list of texts that are not empty"
            case _:
                good, fix = isinstance(value, str) and bool(value), "give a text that is not empty"
        if not good:
            raise RequestError(f"structured_outputs.{kind} has the wrong type", got=shown(value), fix=fix)


_TYPE_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "long", "short", "uint", "int32", "int64", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float", "double", "num", "decimal", "float32", "float64"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("arr", "list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}
"""Names for JSON's types in other languages and in schemas that were written by hand."""


def json_type(name: str) -> str:
    """JSON's name for a type, also of `List[int]` or `dict[str, Any]`."""
    plain = name.split("[")[0].split("<")[0].strip().lower()
    return _TYPE_NAMES.get(plain, plain)


def at_reference(reference: str, root: Any) -> Any:
    """The part of a schema that a reference into it points to, such as `#/$defs/name`; None if there is none."""
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = dict(zip(map(str, range(len(root))), root, strict=True)).get(key)
        else:
            root = root.get(key) if isinstance(root, Mapping) else None
    return root if reference.startswith("#") else None
