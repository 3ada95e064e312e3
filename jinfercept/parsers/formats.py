"""How model families write their calls, by the names that vLLM's `--tool-call-parser` uses."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from jinfercept.parsers.hermes import BARE, CLOSING, OPENING, hermes
from jinfercept.parsers.llama import PYTHON_END, PYTHON_START, PYTHON_TAG, llama3_json, llama4_json
from jinfercept.parsers.mistral import ARGS, CALL_ID, TOOL_CALLS, mistral
from jinfercept.parsers.pieces import CallParser
from jinfercept.parsers.pythonic import pythonic
from jinfercept.parsers.qwen_xml import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, qwen3_coder
from jinfercept.parsers.source import GrammarParser, Marks, Source, Steps, ToolSchemas


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    return uuid.uuid4().hex[:9]


@final
@dataclass(frozen=True, slots=True)
class Format:
    """How one family writes its calls.

    Attributes:
        name: as vLLM calls it.
        family: the models that are trained to it.
        grammar: reads a turn.
        tags: markup around calls; never content.
        turn_ends: the texts of the tokens that may end a turn with calls; never content.
        only_at_start: a call without a tag counts only where the turn begins.
        new_id: makes an id for a call, in the form that the family's template takes.
        ids: regular expression of the ids of calls that its template takes.
        openings: what a call without tags may begin with, where the tools are known.
        tools: schemas of the tools that are offered, by name; None if nobody says.
    """

    name: str
    family: str
    grammar: Callable[[Source], Steps[None]]
    tags: tuple[str, ...]
    turn_ends: tuple[str, ...]
    only_at_start: bool = False
    new_id: Callable[[], str] = _long_id
    ids: str = ".+"
    openings: tuple[str, ...] = ()
    tools: ToolSchemas | None = None

    def parser(self, new_id: Callable[[], str] | None = None) -> CallParser:
        """A parser for one turn.

        Args:
            new_id: makes ids for calls that the model gave none; the format's own by default.
        """
        marks = Marks(self.tags + self.turn_ends, self.openings if self.tools else ())
        return GrammarParser(self.grammar, Source(marks, new_id or self.new_id, self.ids, self.tools))


_LLAMA_3_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_LLAMA_4_ENDS = ("<|eot|>", "<|eom|>", "<|end_of_text|>")
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")

_HERMES = Format(
    name="hermes",
    family="Hermes 2 and 3, Qwen 2.5 and 3",
    grammar=hermes,
    tags=(OPENING, CLOSING),
    turn_ends=_QWEN_ENDS,
    openings=tuple(BARE),
)
_QWEN3_CODER = Format(
    name="qwen3_coder",
    family="Qwen3-Coder, Qwen 3.5",
    grammar=qwen3_coder,
    tags=(OPENING, CLOSING, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END),
    turn_ends=_QWEN_ENDS,
)
_LLAMA3_JSON = Format(
    name="llama3_json",
    family="Llama 3.1, 3.2, 3.3",
    grammar=llama3_json,
    tags=(PYTHON_TAG,),
    turn_ends=_LLAMA_3_ENDS,
    only_at_start=True,
)
_LLAMA4_JSON = Format(
    name="llama4_json",
    family="Llama 4",
    grammar=llama4_json,
    tags=(PYTHON_START, PYTHON_END, PYTHON_TAG),
    turn_ends=_LLAMA_4_ENDS,
    only_at_start=True,
)
_MISTRAL = Format(
    name="mistral",
    family="Mistral, Ministral, Devstral, Magistral",
    grammar=mistral,
    tags=(TOOL_CALLS, CALL_ID, ARGS),
    turn_ends=("</s>",),
    new_id=_short_id,
    ids="[a-zA-Z0-9]{9}",
)
_PYTHONIC = Format(
    name="pythonic",
    family="Llama 3.2 when asked for a list of calls, ToolACE",
    grammar=pythonic,
    tags=(PYTHON_TAG,),
    turn_ends=_LLAMA_3_ENDS,
    only_at_start=True,
)
_LLAMA4_PYTHONIC = Format(
    name="llama4_pythonic",
    family="Llama 4",
    grammar=pythonic,
    tags=(PYTHON_START, PYTHON_END),
    turn_ends=_LLAMA_4_ENDS,
    only_at_start=True,
)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        one.name: one
        for one in (_HERMES, _QWEN3_CODER, _LLAMA3_JSON, _LLAMA4_JSON, _MISTRAL, _PYTHONIC, _LLAMA4_PYTHONIC)
    }
)
"""All formats by name."""

ALIASES: Mapping[str, str] = MappingProxyType({"qwen3_xml": "qwen3_coder"})
"""Other names that vLLM has for them."""


def detect_format(chat_template: str) -> str | None:
    """The name of the format that a chat template asks its model for; None if it knows none of ours.

    Args:
        chat_template: the Jinja source; what it tells the model of tools, and how it writes earlier calls, gives it away.
    """
    said = chat_template.replace('\\"', '"')
    if "[TOOL_CALLS]" in said:
        return "mistral"
    if "<tool_call>" in said:
        if FUNCTION in said:
            return "qwen3_coder"
        others = ("<arg_key>", "<parameter")  # the XML of GLM and MiniMax
        return None if any(tag in said for tag in others) else "hermes"
    if "<|header_start|>" in said and "[func_name1(" in said:
        return "llama4_pythonic"
    if "<|header_start|>" in said and '"parameters"' in said:
        return "llama4_json"
    if "[func_name1(" in said or "[func1(" in said:
        return "pythonic"
    if "<|start_header_id|>" in said and '"parameters"' in said:
        return "llama3_json"
    return None
