"""The tool-call formats of the model families that the engine loads, by the names that vLLM's `--tool-call-parser` uses."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from jinfercept.chat.parsers.gemma import GEMMA4
from jinfercept.chat.parsers.harmony import OPENAI
from jinfercept.chat.parsers.hermes import HERMES
from jinfercept.chat.parsers.json_calls import read_calls
from jinfercept.chat.parsers.llama import LLAMA3_JSON, PYTHONIC
from jinfercept.chat.parsers.mistral import MISTRAL
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS
from jinfercept.chat.parsers.source import Source, Steps
from jinfercept.chat.parsers.tagged_values import GLM45, QWEN3_CODER
from jinfercept.chat.parsers.tool_call_format import CallGrammar, ToolCallFormat, quoted
from jinfercept.errors import JinferceptError, RequestError, shown


@final
@dataclass(frozen=True, slots=True)
class CallLists:
    """A family's format of calls in a JSON list."""

    opening: str  # the tag before the list
    closing: str  # the tag after the list; may be empty
    bracket: str = "["  # "" if the tag includes it
    readable: tuple[str, ...] = ()  # other tags after which calls are read

    def read(self, source: Source) -> Steps[None]:
        """Read a turn. The closing tag may be missing, and objects may be in a list or not (see `read_calls`)."""
        while mark := (yield from source.read_content()):
            if mark in (self.opening, *self.readable):
                yield from read_calls(source, tagged=True)

    def grammar(self, calls: CallGrammar) -> str:
        objects = calls.several(calls.objects("arguments"), '", "')
        return f'{calls.tag(self.opening)} {quoted(self.bracket)} {objects} "]" {calls.tag(self.closing)}'

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write calls of an earlier turn."""
        objects = [json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls]
        return f"{self.opening}{self.bracket}{', '.join(objects)}]{self.closing}"

    def format(
        self, detect: Callable[[str], bool], turn_ends: tuple[str, ...], tags: tuple[str, ...] = ()
    ) -> ToolCallFormat:
        """Make the format of the family. `tags` are markup beside that of calls."""
        return ToolCallFormat(
            read=self.read,
            grammar=self.grammar,
            detect=detect,
            tags=(self.opening, *([self.closing] if self.closing else ()), *self.readable, *tags),
            turn_ends=turn_ends,
            write=self.write,
        )


GRANITE = CallLists("<|tool_call|>", "", readable=("<tool_call>",)).format(
    lambda template: "<|tool_call|>" in template and "<|start_of_role|>" in template, ("<|end_of_text|>",)
)
NEMOTRON = CallLists("<TOOLCALL>", "</TOOLCALL>").format(
    lambda template: "<TOOLCALL>" in template, ("<SPECIAL_12>", "</s>")
)
APRIEL = CallLists("<tool_calls>", "</tool_calls>").format(
    lambda template: "<tool_calls>[" in template, ("<|end|>",), tags=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")
)
FIREFUNCTION = CallLists("functools[", "", bracket="").format(
    lambda template: "functools[" in template, ("<|eot_id|>",)
)


FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "mistral": MISTRAL,  # and Ministral, Devstral, Magistral
        "qwen3_coder": QWEN3_CODER,  # and Qwen 3.5
        "glm45": GLM45,
        "apriel": APRIEL,  # Apriel Nemotron
        "hermes": HERMES,  # Hermes 2 and 3, Qwen 2.5 and 3
        "pythonic": PYTHONIC,  # Llama 3.2 when asked for a list of calls, ToolACE
        "llama3_json": LLAMA3_JSON,  # Llama 3.1, 3.2, 3.3
        "openai": OPENAI,  # gpt-oss
        "gemma4": GEMMA4,
        "granite": GRANITE,  # 3.0 to 3.3
        "nemotron_json": NEMOTRON,  # Llama-3.1-Nemotron-Nano
        "firefunction": FIREFUNCTION,
    }
)
"""All formats by name. `detect_format` tries them in this order."""

ALIASES: Mapping[str, str] = MappingProxyType({"qwen3_xml": "qwen3_coder"})
"""Other names that vLLM has for them."""


def detect_format(chat_template: str) -> str | None:
    """Return the name of the first format that a chat template, a Jinja source, asks its model for; None if there is none.

    A template shows the format where it describes tools and where it writes earlier calls.
    """
    template = chat_template.replace('\\"', '"')
    return next((name for name, form in FORMATS.items() if form.detect(template)), None)


def check_parsers(
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = "auto",
    wrong: type[JinferceptError] = RequestError,
) -> None:
    """Raise `wrong` for unknown names of formats. Needs no model."""
    if tool_call_parser is not None and tool_call_parser not in (*FORMATS, *ALIASES):
        names = ", ".join((*FORMATS, *ALIASES))
        raise wrong("no such tool_call_parser", got=shown(tool_call_parser), fix=f"one of {names}")
    if reasoning_parser not in (None, "auto", *REASONING_FORMATS):
        names = ", ".join(REASONING_FORMATS)
        raise wrong(
            "no such reasoning_parser",
            got=shown(reasoning_parser),
            fix=f"one of auto, none (in Python None), {names}",
        )
