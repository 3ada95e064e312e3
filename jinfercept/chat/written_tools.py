"""Tools for chat templates that know none, or read more of a declaration than clients have to give.

For a template without tools, declarations, calls and results are text in the format of Hermes. A system message declares the
tools and says how to call them; calls stand in the assistant's text, and results in a message of the user.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinfercept.chat.messages import ARGUMENT_FORMS, with_arguments
from jinfercept.chat.parsers.formats import FORMATS, detect_format
from jinfercept.chat.turn_grammars import TurnCalls
from jinfercept.errors import RequestError

log = logging.getLogger(__name__)

FORMAT = "hermes"
"""Name of the format of calls, in `parsers.formats.FORMATS`."""
FUNCTIONS_MARK = "functools["
"""Text in templates whose variable for tools is `functions`, a text (Firefunction); they want a `datetime` too."""

_SYSTEM = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_TOOLS = re.compile(rf"\btools\b|{re.escape(FUNCTIONS_MARK)}")


def are_written(choice: TurnCalls, parser: str | None, template: str) -> bool:
    """Whether a chat's tools are written as text: the template has no variable for them, and shows no format of calls.

    If calls are required or forbidden, the template's format does not matter: the model has to read how it calls these tools. A
    `parser` names a format that the model knows without its template.
    """
    if parser is not None or _TOOLS.search(template):
        return False
    return bool(choice.must_call) or not choice.reads or detect_format(template) is None


def log_written_tools() -> None:
    log.warning(
        "the model's chat template knows no tools: they stand in the system message, and a grammar lets the model answer or "
        "call; a model that was not trained to call may do so badly"
    )


def with_written_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite a conversation so that tools, calls and results are text.

    Args:
        messages: checked, with the arguments of calls as objects where they are JSON.
        tools: OpenAI-style declarations.
    """
    declared = _SYSTEM.format(tools="\n".join(map(_json, tools)))
    written: list[dict[str, Any]] = []
    if not messages or messages[0]["role"] != "system":
        written.append({"role": "system", "content": declared})
    previous = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and not written:
            written.append({**message, "content": f"{content}\n\n{declared}" if content else declared})
        elif role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if previous == "tool":
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            lines = [*([content] if content else []), *(_call(call["function"]) for call in calls)]
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append(without | {"content": "\n".join(lines)})
        else:
            written.append(dict(message))
        previous = role
    return written


def written_calls(message: Mapping[str, Any], template: str) -> str:
    """Write a checked message's calls as the model does, for a template that shows their format but leaves them out."""
    form = FORMATS.get(detect_format(template) or "")
    if form is None or form.write is None or not message.get("tool_calls"):
        return ""
    (message,) = with_arguments([dict(message)], ARGUMENT_FORMS[0])
    return form.write([(call["function"].get("name"), call["function"]["arguments"]) for call in message["tool_calls"]])


def _call(function: Mapping[str, Any]) -> str:
    called = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{_json(called)}\n</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Declarations = Sequence[Mapping[str, Any]]

_VALUES = ("const", "default")
"""Keywords whose value may be null."""
_SCHEMAS = ("items", "additionalProperties", "not")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def rendered_with_tools(tools: Declarations, render: Callable[[Declarations], str]) -> str:
    """Render a template with the first form of declarations that it takes. Raises `RequestError` if it takes none.

    Args:
        tools: the declarations as given, which are tried first.
        render: writes the text, or raises `RequestError`.
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
    last = list(tools)
    # first a description and parameters for each tool; then descriptions of all properties, and objects for schemas that are
    # `true`; then one type for each of these
    for nested, typed in ((False, False), (True, False), (True, True)):
        try:
            form = [_filled_tool(tool, nested, typed) for tool in tools]
        except RecursionError:  # the template's reason stands
            return
        if form != last:
            yield form
        last = form


def usual_variables(template: str, tools: Declarations) -> dict[str, Any]:
    """Return the variables that a template requires, as its model card writes them.

    The date has no time of the day, so that the next prompt begins as the last one did.
    """
    if FUNCTIONS_MARK not in template:
        return {}
    return {"functions": json.dumps(tools, indent=4, ensure_ascii=False), "datetime": f"{datetime.now():%Y-%m-%d}"}


def _filled_tool(tool: Mapping[str, Any], nested: bool, typed: bool) -> dict[str, Any]:
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
    if types := schema.get("type"):
        return next((kind for kind in types if kind != "null"), types[0])
    for key in _LISTS_OF_SCHEMAS:
        options = [
            option["type"] for option in schema.get(key) or () if isinstance(option, Mapping) and "type" in option
        ]
        if options:
            return next((kind for kind in options if kind != "null"), options[0])
    return "object" if "properties" in schema else "string"
