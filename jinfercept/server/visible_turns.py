"""Several turns as the one message that a client sees of them. Knows no requests."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, final

Message = Mapping[str, Any]


@final
class Joint:
    """Texts of several turns as one: a blank line stands between two that bring no space of their own."""

    def __init__(self) -> None:
        self._last = ""
        self._new_turn = False

    def next_turn(self) -> None:
        """What is added from now on is another turn's."""
        self._new_turn = True

    def add(self, text: str) -> str:
        """A piece of text, as it is shown."""
        if not text:
            return ""
        gap = self._new_turn and self._last and not self._last.isspace() and not text[0].isspace()
        self._last, self._new_turn = text[-1], False
        return f"\n\n{text}" if gap else text


def visible_message(turns: Sequence[Message], own: Container[str]) -> dict[str, Any]:
    """What a client sees of an answer.

    Args:
        turns: messages of the assistant, and results of its calls.
        own: names of the tools that the client runs: calls of the last turn are shown if they are of these.

    Returns:
        `content` and `reasoning_content`, texts, and `tool_calls`.
    """
    content, reasoning = Joint(), Joint()
    shown: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for turn in turns:
        if turn["role"] == "assistant":
            content.next_turn()
            reasoning.next_turn()
            shown["content"] += content.add(turn["content"])
            shown["reasoning_content"] += reasoning.add(turn.get("reasoning_content", ""))
            shown["tool_calls"] = [call for call in turn.get("tool_calls", ()) if call["function"]["name"] in own]
    return shown
