"""Makes requests of conversations, each with a transcript that reads its turns.

A turn with calls is a pause: the request keeps its tokens, reads the results as its template writes them, and continues. The
engine runs all of that; this file makes its requests.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinfercept.calls import Call, CallMode, Tool
from jinfercept.chat.function_tools import ChatTool, ChatToolLike, chat_tools
from jinfercept.chat.futures import Futures
from jinfercept.chat.given_tokens import GivenTokens
from jinfercept.chat.messages import Message, call_ids, results_behind_calls
from jinfercept.chat.options import (
    MAX_ROUNDS,
    ChatArguments,
    ChatOptions,
    checked_options,
    reasoning_format,
    text_format,
    tool_call_format,
)
from jinfercept.chat.requests import check_chars, make_requests
from jinfercept.chat.template import ChatTemplate, Rendered
from jinfercept.chat.tool_choice import TurnCalls, compile_answer, compile_answer_or_calls, compile_calls, tool_choice
from jinfercept.chat.tool_messages import ToolMessages
from jinfercept.chat.transcript import ChatTranscript, Note
from jinfercept.chat.turn_grammars import AfterReasoning, PerTurnGrammar
from jinfercept.chat.turn_tokens import Continued, TurnTokens
from jinfercept.chat.turns import ChatTurns
from jinfercept.chat.written_tools import FORMAT, are_written, log_written_tools
from jinfercept.engine.parallel_sampling import forks
from jinfercept.errors import RequestError, shown
from jinfercept.grammar.grammar import Grammars
from jinfercept.hooks import Grammar
from jinfercept.intercept.call_markup import AsyncCalls
from jinfercept.parsers.reasoning import Beginning, ReasoningFormat
from jinfercept.parsers.tool_call_format import ToolCallFormat
from jinfercept.request import Request
from jinfercept.sampling_params import MAX_BIASED_TOKENS, SamplingParams
from jinfercept.tokenizer.tokenizer import Tokenizer
from jinfercept.values.plain import plain

DEFAULT_PARAMS = SamplingParams(max_tokens=1024)
"""Defaults of a chat; a completion's 16 tokens would end most answers early."""


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages."""
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def is_single_chat(prompt: object, detector: object, options: ChatArguments) -> bool:
    """Whether this is one conversation, not one prompt. Raises `RequestError` for arguments that do not go with it."""
    if is_conversation(prompt):
        if detector is not None:
            raise RequestError("a chat takes no detector", got="a detector", fix="name a tool_call_parser")
        return True
    checked_options(options)
    if isinstance(plain(prompt), int | float):
        raise RequestError("a prompt is a text or a list of token ids", got=shown(prompt), fix="give either")
    of_chats = ChatOptions.__annotations__.keys() - {"async_calls", "lora"}
    if names := ", ".join(name for name in options if name in of_chats):
        raise RequestError("chat options need messages", got=names, fix="leave them out")
    return False


def make_chats(
    ids: Iterable[str],
    conversations: Sequence[Message] | Sequence[Sequence[Message]],
    params: SamplingParams | Iterable[SamplingParams] | None,
    tools: Iterable[ChatToolLike] | None,
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    eos_token_ids: Sequence[int],
    note_written_tools: Callable[[], None] = log_written_tools,
    turn_tokens: TurnTokens | GivenTokens | None = None,
    tenant: str = "",
    salt: str = "",
    call_bias: float = 0.0,
) -> list[Request]:
    """One request per conversation and output.

    Args:
        ids: names for the requests, at least as many as conversations.
        conversations: one list of messages, or several.
        tools: those that the model may call.
        eos_token_ids: tokens that end a turn.
        note_written_tools: called if the template knows no tools.
        turn_tokens: the tokens of the chats that these may continue, or of the single one that is continued; None: prompts are
            made of text.
        salt: of their pages.
        call_bias: added to the logit of the token that opens a call, where the model may answer or call.

    Raises:
        RequestError: messages, tools or options are invalid, or the template does not take them.
        ModelError: the model has no chat template.
    """
    if tokenizer is None:
        raise RequestError("a chat needs a tokenizer", got="a model without one", fix="generate from prompt_token_ids")
    listed = _conversations(conversations)
    if not isinstance(turn_tokens, GivenTokens):  # whose messages have their places in the given tokens
        listed = [results_behind_calls(messages) for messages in listed]
    options = checked_options(options)
    calls_run = options.get("async_calls")
    declared = [_with_mode(tool, calls_run.calls) if calls_run else tool for tool in chat_tools(tools)]
    if futures := Futures.of(declared, calls_run or AsyncCalls()):
        declared.append(futures.waiting_tool)
    choice = tool_choice(options.get("tool_choice"), options.get("parallel_tool_calls", True), declared)
    offered = declared if choice.reads else []
    executed = {tool.name: futures.tools[tool.name] if futures else tool.tool for tool in offered if tool.tool}
    source = options.get("chat_template") or tokenizer.chat_template(tools=bool(declared))
    written = bool(declared) and are_written(choice, options.get("tool_call_parser"), source)
    if written:
        note_written_tools()
    parser = FORMAT if written else options.get("tool_call_parser")
    form = tool_call_format(parser, source, declared) if choice.reads else text_format(parser, source)
    ends = tuple(dict.fromkeys([*eos_token_ids, *_tokens_of(form.turn_ends if form else (), tokenizer)]))
    template = _template(tokenizer, declared, written, options, ends)
    reasoning = reasoning_format(options.get("reasoning_parser", "auto"), template.source)
    texts = _prompts(template, listed, options)
    num_new = (params.max_tokens if isinstance(params, SamplingParams) else None) or 1
    prompts: list[Continued | None] = [
        turn_tokens.prompt(template, messages, text, tenant, salt, num_new)
        if turn_tokens is not None and options.get("add_generation_prompt", True)
        else None
        for messages, text in zip(listed, texts, strict=True)
    ]
    later = _later_beginning(template, reasoning, executed)
    turns = ChatTurns(
        tokenizer=tokenizer,
        form=form,
        reasoning=reasoning,
        beginnings=(later, later),
        ends=ends,
        markup=_markup(tokenizer, form, reasoning),
        tools=offered,
        max_rounds=options.get("max_rounds", MAX_ROUNDS),
        must_call=bool(choice.must_call),
        parallel=choice.parallel,
        futures=futures,
    )
    all_turns = [
        turns.of_chat(reasoning.beginning(text) if reasoning else later, call_ids(messages))
        for messages, text in zip(listed, texts, strict=True)
    ]
    requests = make_requests(
        ids,
        [
            {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
            if prompt
            else {"prompt": text, "prompt_token_ids": array("i", template.encode(text))}
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        DEFAULT_PARAMS if params is None else params,
        (),
        None,
        tokenizer,
        grammars,
    )
    if call_bias and choice.reads and not choice.must_call and form and form.tags:
        requests = [_with_bias(request, tokenizer.encode(form.tags[0])[0], call_bias) for request in requests]
    calls, free = _turn_grammars(choice, form, written, template.source, tokenizer, grammars)
    limits = {name: tool.max_result_tokens for name, tool in executed.items()}
    renderer = ToolMessages(template, tokenizer, limits) if form else None
    return [
        _chat(fork, turns, executed, renderer, calls, free, _note_of(turn_tokens, prompt))
        for request, turns, prompt in zip(requests, all_turns, prompts, strict=True)
        for fork in forks(request)
    ]


def _note_of(turn_tokens: TurnTokens | GivenTokens | None, prompt: Continued | None) -> Note | None:
    """Stores the tokens of a chat that has ended, for a follow-up."""
    if turn_tokens is None or prompt is None:
        return None
    return lambda tenant, *written: turn_tokens.remember(tenant, prompt, *written)


def _with_bias(request: Request, token: int, bias: float) -> Request:
    """The request with a token's logit raised, unless its own biases say what becomes of it, or leave no room."""
    biases = request.params.logit_bias or {}
    if token in biases or len(biases) == MAX_BIASED_TOKENS:
        return request
    return replace(request, params=replace(request.params, logit_bias={**biases, token: bias}))


def _turn_grammars(
    choice: TurnCalls,
    form: ToolCallFormat | None,
    written: bool,
    source: str,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
) -> tuple[Grammar | None, Grammar | None]:
    """The grammar of a first turn that has to call, and that of all turns, where tools are written as text."""
    if written and not choice.reads and grammars is not None:
        return None, compile_answer(grammars)
    if form is None or grammars is None:
        return None, None
    calls = compile_calls(choice, form, source, tokenizer, grammars)
    if calls is not None or not written:
        return calls, None
    return None, compile_answer_or_calls(form, choice.parallel, tokenizer, grammars)


def _with_mode(tool: ChatTool, mode: CallMode) -> ChatTool:
    """The tool, whose calls run in this mode if it does not say so itself."""
    if tool.tool is None or tool.tool.calls is not None:
        return tool
    return replace(tool, tool=replace(tool.tool, calls=mode))


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if is_conversation(messages):
        return [messages]
    # An empty tuple is no conversations, with which callers check tools and options; an empty list may be one without messages.
    if not isinstance(messages, list | tuple) or messages == [] or not all(map(is_conversation, messages)):
        raise RequestError(
            "a chat must be a list of messages, or a list of such lists",
            got=shown(messages),
            fix='[{"role": "user", "content": "…"}]',
        )
    return list(messages)


def _template(
    tokenizer: Tokenizer, tools: Sequence[ChatTool], written: bool, options: ChatOptions, ends: tuple[int, ...]
) -> ChatTemplate:
    declarations = [tool.declaration for tool in tools if not tool.is_deferred]
    return ChatTemplate(
        tokenizer,
        declarations,
        options.get("chat_template"),
        options.get("chat_template_kwargs") or {},
        ends,
        options.get("special_tokens_in_text", False),
        declarations if written else [],
    )


def _prompts(
    template: ChatTemplate, conversations: Sequence[Sequence[Message]], options: ChatOptions
) -> list[Rendered]:
    """The rendered conversations. Raises `RequestError` for one that is too long or that the template does not take."""
    texts = [template.render(messages, options.get("add_generation_prompt", True)) for messages in conversations]
    if (max_chars := options.get("max_prompt_chars")) is not None:
        for text in texts:
            check_chars(text, max_chars)
    return texts


def _later_beginning(
    template: ChatTemplate, reasoning: ReasoningFormat | None, executed: Mapping[str, Tool]
) -> Beginning:
    """Returns where later turns begin. Raises `RequestError` if the template has no place for the results of tools."""
    if not executed:
        return "undecided"
    _, after = template.between([Call(next(iter(executed)), "{}", id="123456789")])
    return reasoning.beginning(after) if reasoning else "undecided"


def _markup(tokenizer: Tokenizer, form: ToolCallFormat | None, reasoning: ReasoningFormat | None) -> frozenset[int]:
    """Special tokens that mark calls or reasoning."""
    marks = (
        *(form.tags if form else ()),
        *((reasoning.opening, reasoning.closing) if reasoning else ()),
    )
    return frozenset(_tokens_of(marks, tokenizer))


def _tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    """The special tokens among these texts."""
    encoded: list[list[int]] = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in tokenizer.special_ids]


def _chat(
    request: Request,
    turns: ChatTurns,
    tools: Mapping[str, Tool],
    renderer: ToolMessages | None,
    calls: Grammar | None,
    free: Grammar | None,
    note: Note | None,
) -> Request:
    """A request with its own grammar, which counts its turns.

    Args:
        tools: that the engine runs.
        calls: grammar of its first turn, if that has to call.
        free: grammar of turns that need not call, if the request has none and ends its turns.
        note: stores its tokens.
    """
    if calls is not None and request.params.ignore_eos:
        raise RequestError(
            "ignore_eos cannot be combined with a tool_choice that demands a call", got="ignore_eos", fix="leave it out"
        )
    own = request.grammar or (None if request.params.ignore_eos else free)
    first, later = (
        AfterReasoning(grammar, turns.reasoning, beginning, turns.tokenizer) if grammar and turns.reasoning else grammar
        for grammar, beginning in zip((calls or own, own), turns.beginnings, strict=True)
    )
    grammar = PerTurnGrammar(first, later) if first else None
    transcript = partial(ChatTranscript, turns, note=note)
    below = turns.tokenizer.ids_below
    return replace(request, tools=tools, grammar=grammar, transcript=transcript, render=renderer, ids_below=below)
