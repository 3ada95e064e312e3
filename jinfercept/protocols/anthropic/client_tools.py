"""Tools of Anthropic's that the client runs: its own models know them by their types, those here by these declarations."""

from collections.abc import Mapping
from typing import Any

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_EDIT = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER}
_EDIT |= {"insert_text": _TEXT, "view_range": {"type": "array", "items": _NUMBER}}
_PATHS = {"old_path": _TEXT, "new_path": _TEXT}
_COMMANDS = ("view", "create", "str_replace", "insert")
_TOOLS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "bash": ("Runs a command in a shell that lasts.", {"command": _TEXT, "restart": {"type": "boolean"}}, ()),
    "text_editor": (
        "Views a file or folder, creates a file, replaces a text that a file has once, or inserts one behind a line.",
        {"command": {"type": "string", "enum": [*_COMMANDS]}, **_EDIT},
        ("command", "path"),
    ),
    "memory": (
        "Views and edits files in /memories, which later conversations have, too.",
        {"command": {"type": "string", "enum": [*_COMMANDS, "delete", "rename"]}, **_EDIT, **_PATHS},
        ("command",),
    ),
}
"""Descriptions, arguments and required arguments by the types of tools, without their dates."""


def declared(tool: Any) -> Any:
    """A tool of a body; one of these with its description and schema."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or (name := kind.rpartition("_")[0]) not in _TOOLS:
        return tool
    description, properties, required = _TOOLS[name]
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {**tool, "type": "custom", "description": description, "input_schema": schema}
