"""Checks arguments against the JSON schema of a tool."""

from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from jinfercept.tools.calls import CallFailed
from jinfercept.tools.tool_tables import Place

Check = Callable[[Mapping[str, Any]], None]
"""Raises `CallFailed` for arguments that do not fit the schema; the model reads the message."""

QUESTION = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "with everything that is needed to answer it"}},
    "required": ["question"],
}
"""Schema of the arguments of a tool that declares none."""

_SHOWN = 5


def texts(names: list[str]) -> dict[str, Any]:
    """Make a schema of string arguments, all of them required."""
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def check_of(parameters: Mapping[str, Any], place: Place) -> Check:
    """Make a check against a schema: of draft 2020-12, or of the draft that its `$schema` names.

    Raises `ConfigError` if the schema is invalid, or its type is not object.
    """
    named = isinstance(parameters.get("$schema"), str)
    draft = validator_for(parameters, default=Draft202012Validator) if named else Draft202012Validator
    try:
        draft.check_schema(dict(parameters))
    except SchemaError as error:
        where = ".".join(["parameters", *map(str, error.path)])
        raise place.error(f"{where} is no JSON schema", repr(error.instance)[:80], error.message[:200]) from error
    if parameters.get("type") != "object":
        raise place.error("parameters are an object's schema", repr(parameters.get("type")), 'type = "object"')
    validator = draft(parameters, format_checker=draft.FORMAT_CHECKER)

    def check(arguments: Mapping[str, Any]) -> None:
        wrong = sorted(
            f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message[:200]}"
            for error in validator.iter_errors(arguments)
        )
        if wrong:
            raise CallFailed(f"the arguments do not fit: {'; '.join(wrong[:_SHOWN])}")

    return check
