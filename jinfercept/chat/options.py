"""Options of a chat, their checks, and the formats that they or a chat template name."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict, cast

from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.parsers.formats import ALIASES, FORMATS, check_parsers, detect_format
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning_format
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat
from jinfercept.chat.turn_grammars import ToolChoice
from jinfercept.errors import RequestError, shown
from jinfercept.sampling_params import SamplingParams
from jinfercept.values import plain
from jinfercept.vllm_names import check_arguments

MAX_ROUNDS = 8
"""The default of `ChatOptions.max_rounds`."""


class ChatOptions(TypedDict, total=False):
    """Options of a chat: how it is rendered, and how its calls are read and run.

    Attributes:
        max_rounds: limit of turns whose calls are run; a later turn with calls ends the output (default: 8).
        chat_template: a Jinja source to use instead of the model's.
        chat_template_kwargs: further variables of the template, such as `{"enable_thinking": False}`.
        add_generation_prompt: whether the prompt ends where the assistant's answer begins (default: True).
        tool_call_parser: format of the model's calls, a name in `parsers.formats.FORMATS` (default: as the template asks for).
        reasoning_parser: format of the model's reasoning, a name in `parsers.reasoning.REASONING_FORMATS`; None: reasoning is
            content; "auto": the template's (default). Reasoning is not content and calls nothing, and `structured_outputs`
            constrain only the answer after it.
        tool_choice: "auto": the model may call (default). "required", or a mapping that names a tool: the first turn consists
            of calls that fit the tools' schemas; later turns are free, or as `structured_outputs` say. "none": no text is a
            call; the prompt still declares the tools, so that its pages stay the same. If the template has no tools, the system
            message declares them (`written_tools`), and a grammar lets the model answer or call with "auto", and only answer
            with "none".
        parallel_tool_calls: whether a turn may have several calls; otherwise only its first call counts (default: True).
        max_prompt_chars: limit of characters of a rendered conversation; None: no limit (default).
        async_calls: when calls run whose tools do not say so, what the end of the text does while futures are pending, and how
            many may be pending; a further call is waited for. Its markup does not apply to chats.
        lora: name of the adapter; "": none, even where chats with tools have one by default (`tool_lora`).
        special_tokens_in_text: whether the name of a special token (`<|im_end|>`) in messages, tools and chat_template_kwargs
            becomes that token, so that a text can end its turn and begin another; otherwise it is text (default: False).
    """

    max_rounds: int
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    tool_call_parser: str | None
    reasoning_parser: str | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    max_prompt_chars: int | None
    special_tokens_in_text: bool
    async_calls: AsyncCalls | None
    lora: str | None


class VllmArguments(TypedDict, total=False):
    """Arguments of vLLM's methods that have no effect here. Values that ask for an effect are refused (`vllm_names`)."""

    use_tqdm: Any
    lora_request: None
    priority: None
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    chat_template_content_format: str
    continue_final_message: bool


class ChatArguments(ChatOptions, VllmArguments, total=False):
    """Keyword arguments of a chat, in addition to messages, parameters and tools."""


_SAMPLING = [field.name for field in fields(SamplingParams)]


def check_generate(arguments: Mapping[str, Any]) -> None:
    """Raise `RequestError` for an unknown keyword argument of `generate`, except for vLLM's that ask for nothing."""
    names = ("prompts", "sampling_params", "tools", "detector", "async_calls", "lora", "on_event")
    check_arguments("generate has no such argument", arguments, names, _SAMPLING)


_KINDS: dict[str, tuple[type, str, str]] = {
    "add_generation_prompt": (bool, "is True or False", "give one of them"),
    "special_tokens_in_text": (bool, "is True or False", "give one of them"),
    "tool_call_parser": (str, "is a name", f"one of {', '.join(FORMATS)}"),
    "reasoning_parser": (str, "is a name or None", f"one of auto, {', '.join(REASONING_FORMATS)}"),
    "max_prompt_chars": (int, "is a whole number", "leave it out for no limit"),
    "lora": (str, "is the name of an adapter", "one of `LLM.loras`"),
    "async_calls": (AsyncCalls, "are AsyncCalls", "AsyncCalls(on_end=…)"),
}


def checked_options(options: ChatArguments | ChatOptions) -> ChatOptions:
    """Check options and convert their numbers to Python's. Options that are None are left out, except for `reasoning_parser`.

    Raises `RequestError` if an option is unknown, or has a wrong type.
    """
    check_arguments("a chat has no such option", options, ChatOptions.__annotations__, _SAMPLING)
    values = {name: plain(value) for name, value in options.items() if value is not None or name == "reasoning_parser"}
    for name, (kind, what, fix) in _KINDS.items():
        if not isinstance(value := values.get(name), kind | None):
            raise RequestError(f"{name} {what}", got=shown(value), fix=fix)
    max_rounds = values.get("max_rounds", MAX_ROUNDS)
    if type(max_rounds) is not int or max_rounds < 0:
        raise RequestError("max_rounds is a whole number", got=shown(max_rounds), fix="0 runs no call")
    source = values.get("chat_template")
    if source is not None and (not isinstance(source, str) or not source.strip()):
        raise RequestError("chat_template is Jinja source", got=shown(source), fix="give its text, not empty")
    return cast(ChatOptions, values)


def prompt_options(options: ChatArguments | ChatOptions) -> dict[str, Any]:
    """Return the options of a prompt that is no conversation. Raises `RequestError` for options of a chat."""
    own = {"async_calls", "lora"}
    if names := sorted(options.keys() & ChatOptions.__annotations__.keys() - own):
        raise RequestError("chat options need messages", got=", ".join(names), fix="leave them out")
    return {name: value for name, value in options.items() if name in own}


def tool_call_format(name: str | None, template: str, tools: Sequence[ChatTool]) -> ToolCallFormat:
    """Find the format of calls of these tools.

    Raises `RequestError` if the name is unknown, or there is none and the template asks for no known format.

    Args:
        name: the option `tool_call_parser`; None: the format that the template asks for.
        template: the chat template's source.
    """
    if name is None:
        name = detect_format(template)
        if name is None:
            raise RequestError(
                "the chat template uses no known format of tool calls",
                got="tools",
                fix=f"leave tools out, or name its tool_call_parser: {', '.join(FORMATS)}",
            )
    check_parsers(name)
    return replace(FORMATS[ALIASES.get(name, name)], tools={tool.name: tool.parameters for tool in tools})


def text_format(name: str | None, template: str) -> ToolCallFormat | None:
    """Find the format of text where no tool is offered; None: all text is content. Arguments as of `tool_call_format`."""
    name = name or detect_format(template)
    form = FORMATS.get(ALIASES.get(name, name)) if name else None
    return replace(form, tools={}) if form is not None and form.frames_text else None


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Find the format of reasoning; None: reasoning is content.

    Raises `RequestError` if the name is unknown.

    Args:
        name: the option `reasoning_parser`; "auto": the format of the template.
        template: the chat template's source.
    """
    if name == "auto":
        name = detect_reasoning_format(template)
    check_parsers(reasoning_parser=name)
    return None if name is None else REASONING_FORMATS[name]
