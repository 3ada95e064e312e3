"""Schemas of the tools of `/v1/responses`, and of `tool_choice`. Tools of other types are left out."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jinfercept.protocols.schemas import FIRST_ERROR, Body, Text, TypeName

MAX_TOOLS = 512
"""Maximum tools of a body, those in namespaces included."""

Name = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionTool(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolFormat(Body):
    """The form of a custom tool's input: the model reads it, and it is not enforced."""

    type: TypeName | None = None
    syntax: TypeName | None = None
    definition: Text | None = None


class CustomTool(Body):
    """A tool of the client with a text as input."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: CustomToolFormat | None = None


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

    type: TypeName


def _kind(tool: Any) -> str:
    """Tag of a tool's type."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if kind == "tool_search" and not is_of_client(tool):
        return "Other"
    return _KINDS.get(kind, "Other") if isinstance(kind, str) else ""


def is_of_client(part: Any) -> bool:
    """Whether the client runs the search for tools that a part of a body is about."""
    return (part.get("execution") if isinstance(part, dict) else getattr(part, "execution", None)) == "client"


def _kind_in_namespace(tool: Any) -> str:
    kind = _kind(tool)
    return "Other" if kind in ("LocalShell", "ToolSearch", "Namespace") else kind


_KINDS = {
    "function": "Function",
    "custom": "Custom",
    "local_shell": "LocalShell",
    "tool_search": "ToolSearch",
    "namespace": "Namespace",
}
_NO_TYPE = ("tool_type", "a tool is an object with a type")

NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[OtherTool, Tag("Other")],
    Discriminator(_kind_in_namespace, *_NO_TYPE),
]


class NamespaceTool(Body):
    """Tools of the client under a common name."""

    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: Annotated[list[NamespacedTool], Field(max_length=MAX_TOOLS), FIRST_ERROR]


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

    type: TypeName
    name: Name | None = None
    namespace: Name | None = None


class ResponseToolChoice(ToolReference):
    """A tool that the model has to call, or with the type `allowed_tools` those that it may call.

    Attributes:
        mode: of `allowed_tools`: `required`: one of them has to be called.
        tools: of `allowed_tools`.
    """

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolReference], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
