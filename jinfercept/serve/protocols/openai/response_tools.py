"""Offers the client's tools of `/v1/responses` to the model as functions, and makes items of its calls.

A chat has functions only. A tool of a namespace is a function with both names; a custom tool is one with a text as its only
argument; the local shell is one with a command. Their calls are items of their own types. Tools of other types are left out.
Items of a conversation may have further tools: those that a search has found are declared in its result.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, final

from pydantic import Discriminator, Tag, TypeAdapter

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.chat_schemas import CUSTOM_INPUT, Function, Plain, custom_input, with_grammar
from jinfercept.serve.protocols.schemas import MAX_TOOLS, Body, Name, ShortText, Text, Tools, type_of
from jinfercept.values import json_object


class FunctionTool(Function):
    """A tool that the client runs."""

    type: Literal["function"]


class CustomTool(Body):
    """A tool of the client with a text as input. The model reads its format, which is not enforced."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: dict[str, Any] | None = None


class LocalShellTool(Body):
    """The client's shell."""

    type: Literal["local_shell"]


class ToolSearchTool(Body):
    """The client's search for further tools. A search of the provider's is a tool of another type."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class OtherTool(Body):
    """A tool of a type that is not supported, as OpenAI's hosted tools: it is left out."""

    type: ShortText


def _kind(tool: Any) -> str:
    kind = type_of(tool)
    if kind == "tool_search" and not is_of_client(tool):
        return "Other"
    return _KINDS.get(kind, "Other") if isinstance(kind, str) else ""


def is_of_client(part: Any) -> bool:
    """Whether the client runs the search for tools that a part of a body is about."""
    return (part.get("execution") if isinstance(part, dict) else getattr(part, "execution", None)) == "client"


_KINDS = {
    "function": "Function",
    "custom": "Custom",
    "local_shell": "LocalShell",
    "tool_search": "ToolSearch",
    "namespace": "Namespace",
}
_NO_TYPE = ("tool_type", "a tool is an object with a type")


class NamespaceTool(Body):
    """Functions and custom tools of the client under a common name; others in it are left out."""

    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: "Tools[InputTool]"


InputTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[LocalShellTool, Tag("LocalShell")]
    | Annotated[ToolSearchTool, Tag("ToolSearch")]
    | Annotated[NamespaceTool, Tag("Namespace")]
    | Annotated[OtherTool, Tag("Other")],
    Discriminator(_kind, *_NO_TYPE),
]


class ToolReference(Body):
    """Names a tool of the body by its type, and by its name if tools of the type have one."""

    type: ShortText
    name: Name | None = None
    namespace: Name | None = None


class ResponseToolChoice(ToolReference):
    """A tool that the model has to call, or with the type `allowed_tools` those that it may call.

    Attributes:
        mode: of `allowed_tools`: `required`: one of them has to be called.
        tools: of `allowed_tools`.
    """

    mode: Literal["auto", "required"] | None = None
    tools: Tools[ToolReference] | None = None


CLIENT_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "tool_search_call": "arguments",
}
"""Types of the items of calls that the client runs, with the field of what the model wrote."""

_CALL_TYPES = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "tool_search": "tool_search_call",
}
_SHELL, _SEARCH = "local_shell", "tool_search"
"""Types of tools without names, and the names of their functions."""
_TOOLS = TypeAdapter(list[InputTool])
_COMMAND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class _ClientTool(NamedTuple):
    """A tool that the client runs."""

    tool: FunctionTool | CustomTool | LocalShellTool | ToolSearchTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return self.tool.name if isinstance(self.tool, FunctionTool | CustomTool) else self.tool.type

    @property
    def function(self) -> str:
        return function_name(self.namespace, self.name)

    def is_meant(self, reference: ToolReference) -> bool:
        if reference.type == "namespace":
            return self.namespace is not None and self.namespace == reference.name
        if reference.type != self.tool.type:
            return False
        in_namespace = reference.namespace in (None, self.namespace) and reference.name == self.name
        return in_namespace or reference.name == self.function or reference.type in (_SHELL, _SEARCH)


@final
class ClientTools:
    """The tools of a body that the client runs. Of those that stored items have, the first of a name counts.

    Raises:
        ApiError: 400 for too many tools, namespaces expanded.
    """

    def __init__(self, input_tools: Sequence[InputTool], items: Iterable[Mapping[str, Any]] = ()) -> None:
        tools = list(_flat(input_tools))
        self._tools = {tool.function: tool for tool in tools}
        deferred: list[_ClientTool] = []
        for item in items:
            if item["type"] not in ("additional_tools", "tool_search_output"):
                continue
            into = tools if item["type"] == "additional_tools" else deferred
            for tool in _flat(_TOOLS.validate_python(item["tools"])):
                if self._tools.setdefault(tool.function, tool) is tool:
                    into.append(tool)
        if len(tools) + len(deferred) > MAX_TOOLS:
            raise ApiError.bad(f"at most {MAX_TOOLS} tools are allowed; got {len(tools) + len(deferred)}", "tools")
        self.declarations = [_declaration(tool) for tool in tools]
        self.declarations += [_declaration(tool) | {"deferred": True} for tool in deferred]

    def call_fields(self, function: str) -> tuple[str, dict[str, Any]]:
        """The type of the item of a call by the name that the model wrote, and its fields before any arguments."""
        tool = self._tools.get(function)
        if tool is None:
            short = [tool for tool in self._tools.values() if tool.name == function]
            if len(short) != 1:  # the model made it up: the client says so to it
                return "function_call", {"name": function, "arguments": ""}
            [tool] = short
        kind = _CALL_TYPES[tool.tool.type]
        if kind == "local_shell_call":
            return kind, {"action": _action("")}
        if kind == "tool_search_call":
            return kind, {"execution": "client", "arguments": {}}
        fields = {"name": tool.name, CLIENT_CALLS[kind]: ""}
        return kind, fields if tool.namespace is None else fields | {"namespace": tool.namespace}

    def chat_choice(self, chosen: str | ResponseToolChoice | None) -> Any:
        """A `tool_choice` as that of a chat. Raises 400 for a tool that is not there."""
        if chosen is None or isinstance(chosen, str):
            return chosen
        if chosen.type == "allowed_tools":
            meant = [name for reference in chosen.tools or () for name in self._meant(reference)]
            return {"allowed_tools": {"mode": chosen.mode or "auto", "tools": [*map(_named, meant)]}}
        names = self._meant(chosen)
        if len(names) != 1:
            message = f"tool_choice names one tool, not {len(names)}: a type that is not supported cannot be required"
            raise ApiError.bad(message, "tool_choice", "unsupported_value")
        return _named(names[0])

    def _meant(self, reference: ToolReference) -> list[str]:
        names = [name for name, tool in self._tools.items() if tool.is_meant(reference)]
        if not names and reference.type == "function" and reference.name and not reference.namespace:
            return [reference.name]  # it may be a tool of the server
        if not names and reference.type in (*_CALL_TYPES, "namespace"):
            message = f"tool_choice: no tool is named {reference.name or reference.type!r}"
            raise ApiError.bad(f"{message}: declare it in tools", "tool_choice")
        return names


def function_name(namespace: str | None, name: str) -> str:
    """The name of the function for a tool: its own behind that of its namespace."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def called_function(item: Mapping[str, Any]) -> tuple[str, str]:
    """The name and the arguments of the function that a stored call of the client stands for."""
    match item["type"]:
        case "function_call":
            return function_name(item.get("namespace"), item["name"]), item["arguments"]
        case "custom_tool_call":
            return function_name(item.get("namespace"), item["name"]), _json({"input": item["input"]})
        case "tool_search_call":
            return _SEARCH, _json(item["arguments"])
        case _:
            action = {name: value for name, value in item["action"].items() if name in _COMMAND["properties"] and value}
            return _SHELL, _json(action)


def client_call_value(kind: str, arguments: str) -> Any:
    """The arguments of a call, as the item of a type of `CLIENT_CALLS` has them."""
    match kind:
        case "custom_tool_call":
            return custom_input(arguments)
        case "local_shell_call":
            return _action(arguments)
        case "tool_search_call":
            return json_object(arguments)
        case _:
            return arguments


def declared_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The result of a search: the declarations of the stored tools that it has found."""
    declared = [_declaration(tool) for tool in _flat(_TOOLS.validate_python(tools))]
    return "\n\n".join(map(_json, declared)) or "no tools found"


def _flat(tools: Sequence[InputTool]) -> Iterator[_ClientTool]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from (
                _ClientTool(inner, tool.name) for inner in tool.tools if isinstance(inner, FunctionTool | CustomTool)
            )
        elif not isinstance(tool, OtherTool):
            yield _ClientTool(tool)


def _named(function: str) -> Plain:
    return {"type": "function", "function": {"name": function}}


def _declaration(client_tool: _ClientTool) -> Plain:
    tool = client_tool.tool
    fields: dict[str, Any]
    match tool:
        case FunctionTool():
            fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        case CustomTool():
            form = tool.format or {}
            text = with_grammar(tool.description, form.get("syntax"), form.get("definition"))
            fields = {"description": text, "parameters": CUSTOM_INPUT}
        case LocalShellTool():
            fields = {"description": "Runs a command on the user's machine.", "parameters": _COMMAND}
        case ToolSearchTool():
            fields = {"description": tool.description, "parameters": tool.parameters}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": client_tool.function, **given}}


def _action(arguments: str) -> dict[str, Any]:
    """The action of a call of the local shell. A command that is no list of texts is empty, which no client runs."""
    fields = json_object(arguments)
    command = fields.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    is_command = isinstance(command, list) and all(isinstance(part, str) for part in command)
    env, timeout_ms, directory = fields.get("env"), fields.get("timeout_ms"), fields.get("working_directory")
    return {
        "type": "exec",
        "command": command if is_command else [],
        "env": {name: str(value) for name, value in env.items()} if isinstance(env, dict) else {},
        "timeout_ms": timeout_ms if type(timeout_ms) is int and timeout_ms > 0 else None,
        "working_directory": directory if isinstance(directory, str) else None,
        "user": None,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
