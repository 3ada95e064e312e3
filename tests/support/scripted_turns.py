"""Has the scripted model write the turns of a program whose prompts only the program knows."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.live_server import END
from tests.support.scripted_model import Scripted


def write_turns(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, written: Sequence[str], tool: str | None
) -> list[str]:
    """Has the model write a text for each prompt that offers a tool, and a title for other prompts.

    Args:
        written: the texts.
        tool: its name; None: every prompt gets a text.

    Returns:
        The prompts that got a text, as they come.
    """
    prompts: list[str] = []
    make_chats = scripted.llm.make_chats

    def scripting(*args: Any, **more: Any) -> Any:
        made = make_chats(*args, **more)
        prompt = made[0].prompt
        assert prompt is not None
        says = "A title"  # of the conversation, for which some programs ask first, without tools
        if tool is None or f'"name": "{tool}"' in prompt:
            says = written[len(prompts)]
            prompts.append(prompt)
        scripted.follow(prompt + says + END)
        return made

    monkeypatch.setattr(scripted.llm, "make_chats", scripting)
    return prompts
