"""Converts an MCP tool's result to text."""

import json
from typing import Any

from mcp_types import AudioContent, CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents


def result_text(result: CallToolResult) -> str:
    """The texts of a result, one per line, other parts as descriptions. Without content: the structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(part: Any) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return f"({part.mime_type}, {len(part.data) * 3 // 4} bytes)"
        case EmbeddedResource() if isinstance(part.resource, TextResourceContents):
            return part.resource.text
        case EmbeddedResource():
            return f"({part.resource.uri})"
    return f"({getattr(part, 'uri', part.type)})"
