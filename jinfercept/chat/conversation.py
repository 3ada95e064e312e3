"""Chats: conversations become requests that run their tools, and what comes of them becomes messages.

A turn with calls is a pause: the request keeps its tokens, reads the results as its template writes them, and goes on. The
engine runs all of that; here its requests are made (`chat_turns` reads what it says). Knows no engine.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from jinfercept.chat.function_tools import ChatTool, ChatToolLike, chat_tools
from jinfercept.chat.inputs import check_chars, make_requests
from jinfercept.chat.reasoning_grammar import AfterReasoning
from jinfercept.chat.template import ChatTemplate, Message, ToolMessages
from jinfercept.chat.tool_choice import ToolChoice, compile_calls, tool_choice
from jinfercept.chat.turn_grammar import Turnwise
from jinfercept.chat.turns import ChatReader, ChatTurns
from jinfercept.engine.parallel_sampling import forks
from jinfercept.errors import RequestError
from jinfercept.grammar.grammar import Grammars
from jinfercept.parsers.formats import ALIASES, FORMATS, detect_format
from jinfercept.parsers.reasoning import REASONING_FORMATS, Beginning, ReasoningFormat, detect_reasoning_format
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.request import Call, Grammar, Request, SamplingParams
from jinfercept.tokenizer.tokenizer import Tokenizer

DEFAULT_PARAMS = SamplingParams(max_tokens=1024)
"""Of a chat; a completion's 16 tokens would end most answers early."""

MAX_ROUNDS = 8


class ChatOptions(TypedDict, total=False):
    """How a chat is rendered and how its calls are run.

    Attributes:
        max_rounds: turns whose calls are run; those of the next one are not, and it ends the output (default: 8).
        chat_template: a Jinja source instead of the model's.
        chat_template_kwargs: what else the template reads, `{"enable_thinking": False}` for example.
        add_generation_prompt: whether the prompt ends where the assistant's answer begins (default: True).
        tool_call_parser: how the model writes calls, a name of `parsers.formats.FORMATS`; by default what its template shows.
        reasoning_parser: how the model marks what it thinks before it answers, a name of `parsers.reasoning.REASONING_FORMATS`;
            None: all of it is content; by default "auto": what its template shows. Reasoning is no content and calls nothing,
            and `structured_outputs` are what comes behind it.
        tool_choice: "auto": the model calls if it likes; "required", or a mapping that names one tool: its first turn is calls
            and nothing else, as the schemas of their parameters allow, and what comes of them is answered freely, or as
            `structured_outputs` say; "none": it reads of the tools, so that the prompt and its pages stay the same, and nothing
            that it writes is a call (default: "auto").
        parallel_tool_calls: whether a turn may have several calls; otherwise the first of them is one, and the others are
            nothing (default: True).
        max_prompt_chars: characters that a rendered conversation may have; None: as many as it likes (default).
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


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(_is_message(message) for message in prompt)


def make_chats(
    ids: Iterable[str],
    conversations: Sequence[Message] | Sequence[Sequence[Message]],
    params: SamplingParams | Iterable[SamplingParams] | None,
    tools: Iterable[ChatToolLike],
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    eos_token_ids: Sequence[int],
) -> "Chats":
    """One request per conversation, and by its id who reads what comes of it.

    Args:
        ids: names for the requests, as many as are needed.
        conversations: one list of messages, or several.
        tools: what the model may call.
        eos_token_ids: tokens that end a turn.

    Raises:
        RequestError: messages, tools or options are not what they should be, or the template does not take them.
        ModelError: the model has no chat template.
    """
    if tokenizer is None:
        raise RequestError("a chat needs a tokenizer", got="a model without one", fix="generate from prompt_token_ids")
    listed = _conversations(conversations)
    declared = chat_tools(tools)
    max_rounds = _checked(options)
    source = options.get("chat_template")
    choice = tool_choice(options.get("tool_choice"), options.get("parallel_tool_calls", True), declared)
    if choice.reads:
        form = _format(options.get("tool_call_parser"), source or tokenizer.chat_template(tools=True), declared)
        ends = tuple(dict.fromkeys([*eos_token_ids, *_tokens_of(form.turn_ends, tokenizer)]))
    else:
        form, ends = None, tuple(eos_token_ids)
    declarations = [tool.declaration for tool in declared]
    as_tokens = options.get("special_tokens_in_text", False)
    template = ChatTemplate(tokenizer, declarations, source, options.get("chat_template_kwargs", {}), ends, as_tokens)
    thinking = _thinking(options.get("reasoning_parser", "auto"), template.source)
    texts = [template.render(messages, options.get("add_generation_prompt", True)) for messages in listed]
    if (max_chars := options.get("max_prompt_chars")) is not None:
        for text in texts:
            check_chars(text, max_chars)
    later: Beginning = "undecided"
    if not choice.reads:
        declared = []
    if any(tool.tool for tool in declared):
        follows = template.between([Call(declared[0].name, "{}", id="123456789")])  # refuses what could not go on later
        later = thinking.beginning(follows[1]) if thinking else later
    marks = (*(form.tags if form else ()), *((thinking.opening, thinking.closing) if thinking else ()))
    first = ChatTurns(
        tokenizer=tokenizer,
        form=form,
        thinking=thinking,
        beginnings=(later, later),
        seed=f"{uuid.uuid4()}",
        ends=ends,
        hidden=tokenizer.special_ids - set(_tokens_of(marks, tokenizer)),
        tools=declared,
        max_rounds=max_rounds,
        parallel=choice.parallel,
    )
    turns = [replace(first, beginnings=(thinking.beginning(text), later)) if thinking else first for text in texts]
    requests = make_requests(
        ids,
        [{"prompt": text, "prompt_token_ids": template.encode(text)} for text in texts],
        DEFAULT_PARAMS if params is None else params,
        [tool.tool for tool in declared if tool.tool],
        turns if form else [None] * len(listed),
        tokenizer,
        grammars,
    )
    renderer = ToolMessages(
        template, tokenizer, {tool.name: tool.tool.max_result_tokens for tool in declared if tool.tool}
    )
    calls = compile_calls(choice, form, template.source, tokenizer, grammars) if form and grammars else None
    chats = Chats([], {})
    for request, read in zip(requests, turns, strict=True):
        for fork in forks(request):
            own = replace(read, seed=f"{read.seed}/{fork.id}")
            chats.requests.append(_chat(fork, own, renderer if form else None, calls))
            chats.readers[fork.id] = ChatReader(own, fork.params)
    return chats


class Chats(NamedTuple):
    """Requests, and by their ids who reads what comes of them."""

    requests: list[Request]
    readers: dict[str, ChatReader]


def _chat(request: Request, turns: ChatTurns, renderer: ToolMessages | None, calls: Grammar | None) -> Request:
    """A request as one chat of its own, with its own count of turns.

    Args:
        calls: what its first turn has to be.
    """
    if calls is not None and request.params.ignore_eos:
        raise RequestError(
            "tool_choice asks for a call, and a call ends its turn", got="ignore_eos", fix="leave it out"
        )
    first, later = (
        AfterReasoning(grammar, turns.thinking, beginning, turns.tokenizer) if grammar and turns.thinking else grammar
        for grammar, beginning in zip((calls or request.grammar, request.grammar), turns.beginnings, strict=True)
    )
    grammar = Turnwise(first, later) if first else None
    return replace(request, grammar=grammar, detector=turns if renderer else None, render=renderer)


def _conversations(given: Any) -> list[Sequence[Message]]:
    if is_conversation(given):
        return [given]
    if not isinstance(given, list | tuple) or not all(is_conversation(one) for one in given):
        raise RequestError(
            "a chat is a list of messages, or several such lists",
            got=repr(given)[:80],
            fix='[{"role": "user", "content": "…"}]',
        )
    return list(given)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _checked(options: ChatOptions) -> int:
    """The limit of rounds; raises `RequestError` for options that there are not."""
    unknown = sorted(set(options) - set(ChatOptions.__annotations__))
    if unknown:
        known = ", ".join(sorted(ChatOptions.__annotations__))
        raise RequestError("a chat has no such option", got=", ".join(unknown), fix=f"the options are {known}")
    max_rounds = options.get("max_rounds", MAX_ROUNDS)
    if type(max_rounds) is not int or max_rounds < 0:
        raise RequestError("max_rounds is a whole number", got=repr(max_rounds), fix="0 runs no call")
    source = options.get("chat_template")
    if source is not None and (not isinstance(source, str) or not source.strip()):
        raise RequestError("chat_template is Jinja source", got=repr(source)[:80], fix="give its text, not empty")
    return max_rounds


def _format(name: str | None, template: str, tools: Sequence[ChatTool]) -> ToolCallFormat:
    """How the model writes calls of these tools, by name or as its template shows."""
    if name is None:
        name = detect_format(template)
        if name is None:
            raise RequestError(
                "the model's chat template shows no format of calls that is known",
                got="tools",
                fix=f"leave tools out, or name its tool_call_parser: {', '.join(FORMATS)}",
            )
    check_parsers(name)
    return replace(FORMATS[ALIASES.get(name, name)], tools={tool.name: tool.parameters for tool in tools})


def check_parsers(tool_call_parser: str | None = None, reasoning_parser: str | None = "auto") -> None:
    """Raises `RequestError` for names that `ChatOptions` does not know; needs no model."""
    if tool_call_parser is not None and ALIASES.get(tool_call_parser, tool_call_parser) not in FORMATS:
        names = ", ".join((*FORMATS, *ALIASES))
        raise RequestError("no such tool_call_parser", got=repr(tool_call_parser), fix=f"one of {names}")
    if reasoning_parser not in (None, "auto", *REASONING_FORMATS):
        names = ", ".join(REASONING_FORMATS)
        raise RequestError("no such reasoning_parser", got=repr(reasoning_parser), fix=f"one of auto, {names}, or None")


def _thinking(name: str | None, template: str) -> ReasoningFormat | None:
    """How the model marks its reasoning, by name or as its template shows."""
    if name == "auto":
        name = detect_reasoning_format(template)
    check_parsers(reasoning_parser=name)
    return None if name is None else REASONING_FORMATS[name]


def _tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    """The special tokens among these texts."""
    encoded: list[list[int]] = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in tokenizer.special_ids]
