"""Declarations of tools for chat templates that read more of them than clients have to give."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinfercept.chat.written_tools import FUNCTIONS_MARK
from jinfercept.errors import RequestError

Declarations = Sequence[Mapping[str, Any]]

_VALUES = ("const", "default")
"""Keywords whose value may be null."""
_SCHEMAS = ("items", "additionalProperties", "not")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def rendered_with_tools(tools: Declarations, render: Callable[[Declarations], str]) -> str:
    """The text that a template writes with the first form of declarations that it takes.

    Args:
        tools: the declarations as they are given, which is their first form.
        render: writes the text, or raises `RequestError`.

    Raises:
        RequestError: it takes none of the forms.
    """
    try:
        return render(tools)
    except RequestError as error:
        for form in _fuller_forms(tools):
            with suppress(RequestError):
                return render(form)
        if not _renders(render, []):
            raise
        raise RequestError(
            "the chat template does not take these tools",
            got=error.got,
            fix="declare them as OpenAI does: a name, a description, and parameters, the JSON schema of an object",
        ) from error


def _renders(render: Callable[[Declarations], str], tools: Declarations) -> bool:
    try:
        render(tools)
    except RequestError:
        return False
    return True


def _fuller_forms(tools: Declarations) -> Iterator[list[dict[str, Any]]]:
    """Forms of declarations for a template that refuses them, the closest first.

    A description and parameters for each tool; then descriptions of all properties, and objects for schemas that are `true`;
    then one type for each of these.
    """
    last = list(tools)
    for nested, typed in ((False, False), (True, False), (True, True)):
        try:
            form = [_filled_tool(tool, nested, typed) for tool in tools]
        except RecursionError:  # the template's reason stands
            return
        if form != last:
            yield form
        last = form


def usual_variables(template: str, tools: Declarations) -> dict[str, Any]:
    """Variables that a template has to have, in the words of its model card; the date without the time of the day, so that the
    next prompt begins as the last one did.

    Args:
        template: the chat template's source.
    """
    if FUNCTIONS_MARK not in template:
        return {}
    return {"functions": json.dumps(tools, indent=4, ensure_ascii=False), "datetime": f"{datetime.now():%Y-%m-%d}"}


def _filled_tool(tool: Mapping[str, Any], nested: bool, typed: bool) -> dict[str, Any]:
    """A declaration with all fields that OpenAI leaves optional.

    Args:
        nested: whether its properties are filled too.
        typed: whether each of them has one type.
    """
    function = tool["function"]
    schema = function.get("parameters")
    parameters = {"type": "object", "properties": {}} | (_without_null(schema) if isinstance(schema, Mapping) else {})
    if nested:
        parameters = _filled_schema(parameters, typed)
    filled = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": filled}


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if value is not None or key in _VALUES}


def _filled_schema(schema: Any, typed: bool) -> Any:
    """A schema whose properties have descriptions, and all of whose schemas are objects; `false` stays."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        return schema
    filled = _without_null(schema)
    for key, value in schema.items():
        if typed and key == "items" and isinstance(value, list):
            filled[key] = _filled_schema({"anyOf": value}, typed)
        elif key in _SCHEMAS and not (key == "additionalProperties" and value is True):
            filled[key] = _filled_schema(value, typed)
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            filled[key] = [_filled_schema(option, typed) for option in value]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            filled[key] = {name: _filled_property(option, typed) for name, option in value.items()}
    if typed and (isinstance(filled.get("type"), list) or "type" not in filled):
        filled["type"] = _first_type(filled)
    return filled


def _filled_property(schema: Any, typed: bool) -> Any:
    filled = _filled_schema(schema, typed)
    if isinstance(filled, dict) and not isinstance(filled.get("description"), str):
        described = filled.get("description")
        filled["description"] = "" if described is None else str(described)
    return filled


def _first_type(schema: Mapping[str, Any]) -> str:
    """The first type of a schema that is not null; that of its first option or value, or a string's, where it names none."""
    if types := schema.get("type"):
        return next((kind for kind in types if kind != "null"), types[0])
    for key in _LISTS_OF_SCHEMAS:
        options = [
            option["type"] for option in schema.get(key) or () if isinstance(option, Mapping) and "type" in option
        ]
        if options:
            return next((kind for kind in options if kind != "null"), options[0])
    return "object" if "properties" in schema else "string"
