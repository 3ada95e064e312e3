"""Merges the turns of an answer into the one message that a client sees. Knows no requests."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, final

Message = Mapping[str, Any]


@final
class TextJoiner:
    """Joins texts of several turns, with a blank line between two turns that are not separated by white space."""

    def __init__(self) -> None:
        self._last = ""
        self._new_turn = False

    def next_turn(self) -> None:
        """Texts that are added from now on belong to another turn."""
        self._new_turn = True

    def add(self, text: str) -> str:
        """A piece of text, with the blank line before it if it needs one."""
        if not text:
            return ""
        gap = self._new_turn and self._last and not self._last.isspace() and not text[0].isspace()
        self._last, self._new_turn = text[-1], False
        return f"\n\n{text}" if gap else text


def merged_message(turns: Sequence[Message], client_tools: Container[str]) -> dict[str, Any]:
    """The message that a client sees of an answer.

    Args:
        turns: messages of the assistant, and results of its calls.
        client_tools: names of the tools that the client runs; calls of other tools are left out.

    Returns:
        The texts `content` and `reasoning_content` of all turns, and `tool_calls` of the last one.
    """
    content, reasoning = TextJoiner(), TextJoiner()
    shown: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for turn in turns:
        if turn["role"] == "assistant":
            content.next_turn()
            reasoning.next_turn()
            shown["content"] += content.add(turn["content"])
            shown["reasoning_content"] += reasoning.add(turn.get("reasoning_content", ""))
            shown["tool_calls"] = [
                call for call in turn.get("tool_calls", ()) if call["function"]["name"] in client_tools
            ]
    return shown
