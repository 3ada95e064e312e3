"""The table in `docs/templates.md`: what the chat templates of published models make of a conversation with a call.

`python -m tests.support.template_table` writes it anew.
"""

import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import ValidationError

from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.parsers.formats import FORMATS, detect_format
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.turn_grammars import tool_choice
from jinfercept.chat.written_tools import FORMAT, are_written
from jinfercept.errors import RequestError
from jinfercept.events import CallEnded
from tests.support.call_corpus import calls, turn
from tests.support.docs_blocks import DOCS
from tests.support.fetched_packages import published_package
from tests.support.scripted_model import byte_tokenizer

PAGE = DOCS / "templates.md"
FOLDER = "vendor/llama.cpp/models/templates/"
NUM_DRAWN = 4
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "which"},
        "exact": {"type": "boolean", "description": "whether"},
    },
    "required": ["city", "days"],
}
TOOLS: dict[str, Any] = {"get_weather": PARAMETERS}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Finds the zephyr.", "parameters": PARAMETERS},
}
VALUES = {"city": "São Paulo", "days": 3, "tags": ["a", 'b "c"'], "exact": True}
QUESTION = {"role": "user", "content": "How is it there?"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(VALUES, ensure_ascii=False)},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "Misty and mild."}


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        template: its name.
        rendered: "yes", or why it refuses a question, a call, and its result.
        tools: whether the prompt has a tool's name and description, and the result of a call.
        format: that of its calls.
        drawn: turns that the format's grammar allows are read back.
        own: the call is read back from the turn as the template writes it.
        following: the prompt of the next turn begins with the last prompt.
    """

    template: str
    rendered: str
    tools: str
    format: str
    drawn: str
    own: str
    following: str

    @property
    def line(self) -> str:
        """As Markdown."""
        return f"| {' | '.join(self)} |"


def published_templates() -> dict[str, str]:
    """The sources by name of those that know no tools, or whose format of calls is known; see `published_package`."""
    sources: dict[str, str] = {}
    with tarfile.open(published_package()) as package:
        for member in package:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                content = package.extractfile(member)
                assert content is not None
                sources[Path(member.name).stem] = content.read().decode()
    return {name: source for name, source in sources.items() if _are_written(source) or detect_format(source)}


def _are_written(source: str) -> bool:
    return are_written(tool_choice("auto", True, chat_tools([TOOL])), None, source)


def row_of(name: str, source: str) -> Row:
    """The line of one template, with the tools that a chat would declare to it."""
    written = _are_written(source)
    form = FORMAT if written else detect_format(source)
    assert form is not None, name
    template = ChatTemplate(
        byte_tokenizer(None), [] if written else [TOOL], source, {}, (), written_tools=[TOOL] if written else []
    )
    try:
        prompt = template.render([QUESTION])
        following = template.render([QUESTION, CALLING, RESULT])
        whole = template.render([QUESTION, CALLING], add_generation_prompt=False)
    except RequestError as error:
        return Row(name, f"no: {error.got}", "", form, _drawn(form, source), "", "")
    shown = all(text in following for text in ("get_weather", "Finds the zephyr.", "Misty and mild."))
    return Row(
        template=name,
        rendered="yes",
        tools=("system message" if written else "yes") if shown else "no",
        format=form,
        drawn=_drawn(form, source),
        own=_own(form, prompt, whole),
        following="yes" if following.startswith(prompt) else "no",
    )


def _drawn(form: str, source: str) -> str:
    try:
        for seed in range(NUM_DRAWN):
            calls(form, TOOLS, turn(form, source, TOOLS, seed))
    except (AssertionError, ValidationError, KeyError) as error:
        return f"no: {type(error).__name__}"
    return "yes"


def _own(form: str, prompt: str, whole: str) -> str:
    """Read the turn that the template writes, without empty reasoning."""
    begins = next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if len({*pair}) == 2), len(prompt))
    begins = whole.rindex("<", 0, begins) if "<" in whole[:begins].rpartition(">")[2] else begins  # within a tag
    written = re.sub(r"^\s*(<\S*think\S*>)?\s*(</\S*think\S*?>)\s*", "", whole[begins:])
    parser = replace(FORMATS[form], tools=TOOLS).parser()
    pieces = [piece for char in written for piece in parser.feed(char)] + parser.finish()
    read = [(piece.call.name, json.loads(piece.call.arguments)) for piece in pieces if isinstance(piece, CallEnded)]
    return "yes" if read == [("get_weather", VALUES)] else "no"


def committed() -> Mapping[str, str]:
    """The lines of the page's table, by the template's name."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in lines[2:]}


def main() -> None:
    """Write the table to the page."""
    text = PAGE.read_text(encoding="utf-8")
    heads = [line for line in text.splitlines() if line.startswith("|")][:2]
    start, end = text.index(heads[0]), text.rindex("|\n") + 2
    sources = published_templates()
    lines = [*heads, *(row_of(name, sources[name]).line for name in sorted(sources, key=str.lower))]
    PAGE.write_text(text[:start] + "\n".join(lines) + "\n" + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
