"""Options of a chat, checked, and the formats that they name or that a chat template asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.tool_choice import ToolChoice
from jinfercept.errors import RequestError
from jinfercept.intercept.call_markup import AsyncCalls
from jinfercept.parsers.formats import ALIASES, FORMATS, detect_format
from jinfercept.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning_format
from jinfercept.parsers.tool_call_format import ToolCallFormat

MAX_ROUNDS = 8
"""The default of `ChatOptions.max_rounds`."""


class ChatOptions(TypedDict, total=False):
    """Options of a chat: how it is rendered, and how its calls are read and run.

    Attributes:
        max_rounds: limit of turns whose calls are run; a later turn with calls ends the output (default: 8).
        chat_template: a Jinja source instead of the model's.
        chat_template_kwargs: further variables of the template, `{"enable_thinking": False}` for example.
        add_generation_prompt: whether the prompt ends where the assistant's answer begins (default: True).
        tool_call_parser: the format of the model's calls, a name of `parsers.formats.FORMATS`; by default the one that its
            template asks for.
        reasoning_parser: the format of the model's reasoning, a name of `parsers.reasoning.REASONING_FORMATS`; None: reasoning
            is content; "auto": the one of its template (default). Reasoning is not content and calls nothing, and
            `structured_outputs` constrain only the answer behind it.
        tool_choice: "auto": the model may call; "required", or a mapping that names one tool: its first turn is calls and
            nothing else, as the schemas of their parameters allow, and later turns are free, or as `structured_outputs` say;
            "none": the prompt declares the tools, so that its pages stay the same, and no text is a call (default: "auto").
            If the chat template has no tools, all but "auto" write them into the system message (`written_tools`).
        parallel_tool_calls: whether a turn may have several calls; otherwise all but its first call are dropped
            (default: True).
        max_prompt_chars: limit of characters of a rendered conversation; None: no limit (default).
        async_calls: when the calls of tools run that do not say so themselves, what the end of the text does while futures are
            pending, and how many may be; a further call is waited for. Its markup is not for chats.
        special_tokens_in_text: whether the name of a special token (`<|im_end|>`) in messages, tools and chat_template_kwargs
            becomes that token, so that a text can end its turn and begin another; otherwise it is text (default: False).
    """

    max_rounds: int
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    tool_call_parser: str | None
    reasoning_parser: str | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    max_prompt_chars: int | None
    special_tokens_in_text: bool
    async_calls: AsyncCalls | None


def check_options(options: ChatOptions) -> None:
    """Raise `RequestError` for unknown options, a wrong `max_rounds` and a wrong `chat_template`."""
    unknown = sorted(set(options) - set(ChatOptions.__annotations__))
    if unknown:
        known = ", ".join(sorted(ChatOptions.__annotations__))
        raise RequestError("a chat has no such option", got=", ".join(unknown), fix=f"the options are {known}")
    max_rounds = options.get("max_rounds", MAX_ROUNDS)
    if type(max_rounds) is not int or max_rounds < 0:
        raise RequestError("max_rounds is a whole number", got=repr(max_rounds), fix="0 runs no call")
    calls = options.get("async_calls")
    if not isinstance(calls, AsyncCalls | None):
        raise RequestError("async_calls are AsyncCalls", got=repr(calls)[:80], fix="AsyncCalls(on_end=…)")
    source = options.get("chat_template")
    if source is not None and (not isinstance(source, str) or not source.strip()):
        raise RequestError("chat_template is Jinja source", got=repr(source)[:80], fix="give its text, not empty")


def check_parsers(tool_call_parser: str | None = None, reasoning_parser: str | None = "auto") -> None:
    """Raise `RequestError` for unknown parser names; needs no model."""
    if tool_call_parser is not None and ALIASES.get(tool_call_parser, tool_call_parser) not in FORMATS:
        names = ", ".join((*FORMATS, *ALIASES))
        raise RequestError("no such tool_call_parser", got=repr(tool_call_parser), fix=f"one of {names}")
    if reasoning_parser not in (None, "auto", *REASONING_FORMATS):
        names = ", ".join(REASONING_FORMATS)
        raise RequestError("no such reasoning_parser", got=repr(reasoning_parser), fix=f"one of auto, {names}, or None")


def tool_call_format(name: str | None, template: str, tools: Sequence[ChatTool]) -> ToolCallFormat:
    """The format of calls of these tools.

    Args:
        name: the option `tool_call_parser`; None: the format that the template asks for.
        template: the chat template's source.

    Raises:
        RequestError: the name is unknown, or there is none and the template asks for no known format.
    """
    if name is None:
        name = detect_format(template)
        if name is None:
            raise RequestError(
                "the model's chat template shows no format of calls that is known",
                got="tools",
                fix=f"leave tools out, require a call (tool_choice), or name its tool_call_parser: {', '.join(FORMATS)}",
            )
    check_parsers(name)
    return replace(FORMATS[ALIASES.get(name, name)], tools={tool.name: tool.parameters for tool in tools})


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """The format of reasoning; None if reasoning is content.

    Args:
        name: the option `reasoning_parser`; "auto": the format of the template.
        template: the chat template's source.

    Raises:
        RequestError: the name is unknown.
    """
    if name == "auto":
        name = detect_reasoning_format(template)
    check_parsers(reasoning_parser=name)
    return None if name is None else REASONING_FORMATS[name]
