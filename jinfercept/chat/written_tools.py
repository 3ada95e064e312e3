"""Tools for chat templates that know none, or read more of a declaration than clients have to give.

For a template without tools, declarations, calls and results are text in the format of Hermes. A system message declares the
tools and says how to call them; calls stand in the assistant's text, and results in a message of the user.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
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
_SCHEMAS = ("items", "not")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def rendered_with_tools(tools: Declarations, render: Callable[[Declarations], str]) -> str:
    """Render a template with declarations as given, or with full ones if it refuses these.

    Raises `RequestError` if it refuses both. `render` writes the text, or raises `RequestError`.
    """
    try:
        return render(tools)
    except RequestError as error:
        with suppress(RequestError, RecursionError, AttributeError):  # a schema may be no schema
            return render([_full_tool(tool) for tool in tools])
        try:
            render([])
        except RequestError:
            raise error from None
        raise RequestError(
            "the chat template does not take these tools",
            got=error.got,
            fix="declare them as OpenAI does: a name, a description, and parameters, the JSON schema of an object",
        ) from error


def usual_variables(template: str, tools: Declarations) -> dict[str, Any]:
    """Return the variables that a template requires, as its model card writes them.

    The date has no time of the day, so that the next prompt begins as the last one did.
    """
    if FUNCTIONS_MARK not in template:
        return {}
    return {"functions": json.dumps(tools, indent=4, ensure_ascii=False), "datetime": f"{datetime.now():%Y-%m-%d}"}


def _full_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = {"type": "object", "properties": {}} | _full_schema(function.get("parameters") or {"type": "object"})
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }


def _full_schema(schema: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    # every property has a description, and every schema one type
    given = schema if isinstance(schema, Mapping) else {}  # true is a schema, too
    full = {key: value for key, value in given.items() if value is not None or key in _VALUES}
    for key, value in full.items():
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            full[key] = [_full_schema(option) for option in value]
        elif key in _SCHEMAS:
            full[key] = _full_schema({"anyOf": value} if isinstance(value, list) else value)
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            full[key] = {name: {"description": "", **_full_schema(part)} for name, part in value.items()}
    if not isinstance(full.get("type"), str):
        full["type"] = _first_type(full)
    return full


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
