"""Lessons: dialogues about the same tools, read from a file of JSON Lines.

`lessons.jsonl.xz` has those that the published adapter learnt from, `held_out.jsonl.xz` dialogues about skills of no lesson.
"""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LESSONS = Path(__file__).with_name("lessons.jsonl.xz")
HELD_OUT = Path(__file__).with_name("held_out.jsonl.xz")


class Dialogue(NamedTuple):
    """A conversation with tools.

    Attributes:
        tools: OpenAI-style declarations.
        messages: OpenAI-style; the agent's have `tool_calls` or a text.
    """

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def lessons(file: Path) -> Iterator[list[Dialogue]]:
    """The lessons of a file, one a line: an object with `tools`, and with `dialogues`, each a list of messages.

    Args:
        file: of JSON Lines, compressed with xz if its name ends with `.xz`.
    """
    with (lzma.open if file.suffix == ".xz" else open)(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            lesson = json.loads(line)
            yield [Dialogue(lesson["tools"], messages) for messages in lesson["dialogues"]]
