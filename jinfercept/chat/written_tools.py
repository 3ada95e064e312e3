"""Tools of a chat whose template knows none: declarations, calls and results written as text, in the format of Hermes.

A system message declares the tools and says how they are called; calls stand in the assistant's text, and results in a message
of the user.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinfercept.chat.messages import ARGUMENT_FORMS, with_arguments
from jinfercept.chat.tool_choice import TurnCalls
from jinfercept.parsers.formats import FORMATS, detect_format

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

    Where calls are required or forbidden the format does not matter: the model has to read how it calls these tools.

    Args:
        choice: of the tools that the model has to call, or may not.
        parser: the option `tool_call_parser`, which names a format that the model knows without its template.
        template: the chat template's source.
    """
    if parser is not None or _TOOLS.search(template):
        return False
    return bool(choice.must_call) or not choice.reads or detect_format(template) is None


def log_written_tools() -> None:
    """Log that a model's template knows no tools."""
    log.warning(
        "the model's chat template knows no tools: they stand in the system message, and a grammar lets the model answer or "
        "call; a model that was not trained to call may do so badly"
    )


def with_written_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation in which tools, calls and results are text.

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
    """A message's calls as the model writes them, for a template that shows their format and leaves them out; "" without any.

    Args:
        message: checked.
        template: the chat template's source.
    """
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
