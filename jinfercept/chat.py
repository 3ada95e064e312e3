"""Chats: conversations become requests that run their tools, and what comes of them becomes messages.

A turn with calls is a pause: the request keeps its tokens, reads the results as its template writes them, and goes on. The
engine runs all of that; here its requests are made, and its events and outputs are read. Knows no engine.
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, final

from jinfercept.chat_template import ChatTemplate, Message, ToolMessages, call_message
from jinfercept.errors import RequestError
from jinfercept.forks import forks
from jinfercept.function_tools import ChatTool, ChatToolLike, chat_tools
from jinfercept.grammar import Grammars
from jinfercept.inputs import make_requests
from jinfercept.intercept.format_detector import FormatDetector
from jinfercept.intercept.formats import FORMATS, Format, detect_format
from jinfercept.intercept.pieces import CallEnded, Content, Piece
from jinfercept.request import (
    Call,
    CompletionOutput,
    Event,
    Finished,
    Intercepted,
    Request,
    RequestOutput,
    Resumed,
    SamplingParams,
    Token,
    Watch,
)
from jinfercept.stream import TextStream
from jinfercept.tokenizer import Tokenizer

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
        tool_call_parser: how the model writes calls, a name of `intercept.formats.FORMATS`; by default what its template shows.
    """

    max_rounds: int
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    tool_call_parser: str | None


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
    if declared:
        form = _format(options.get("tool_call_parser"), source or tokenizer.chat_template(tools=True))
        ends = tuple(dict.fromkeys([*eos_token_ids, *_tokens_of(form.turn_ends, tokenizer)]))
    else:
        form, ends = None, tuple(eos_token_ids)
    declarations = [tool.declaration for tool in declared]
    template = ChatTemplate(tokenizer, declarations, source, options.get("chat_template_kwargs", {}), ends)
    if any(tool.tool for tool in declared):
        template.between([Call(declared[0].name, "{}", id="123456789")])  # refuses now what could not go on later
    shown = set(_tokens_of(form.tags, tokenizer)) if form else set()
    turns = [
        _Turns(tokenizer, form, f"{uuid.uuid4()}", ends, tokenizer.special_ids - shown, declared, max_rounds)
        for _ in listed
    ]
    texts = [template.render(messages, options.get("add_generation_prompt", True)) for messages in listed]
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
    requests = [replace(request, render=renderer if form else None) for request in requests]
    forked = [(fork, one) for request, one in zip(requests, turns, strict=True) for fork in forks(request)]
    return Chats([fork for fork, _ in forked], {fork.id: ChatReader(one, fork.params) for fork, one in forked})


class Chats(NamedTuple):
    """Requests, and by their ids who reads what comes of them."""

    requests: list[Request]
    readers: "dict[str, ChatReader]"


@final
@dataclass(frozen=True, slots=True)
class _Turns:
    """How one chat's turns are read, on the engine's side (as its detector) and on the client's: alike, down to the calls' ids.

    Attributes:
        form: how calls are written; None if there are no tools.
        seed: from which the ids of calls come.
        ends: tokens that end a turn.
        hidden: special tokens that are no markup of calls: neither content nor part of a call.
        tools: what was declared.
        max_rounds: turns whose calls are run.
    """

    tokenizer: Tokenizer
    form: Format | None
    seed: str
    ends: tuple[int, ...]
    hidden: frozenset[int]
    tools: Sequence[ChatTool]
    max_rounds: int

    def watch(self) -> Watch:
        form = self.own_format()
        assert form is not None
        return _TurnWatch(FormatDetector(form, self.ends).watch(), self)

    def own_format(self) -> Format | None:
        """The format, its ids counted from the first again."""
        if self.form is None:
            return None
        shape, numbers = self.form.new_id(), iter(range(1 << 62))
        prefix = shape[: shape.rfind("_") + 1]

        def new_id() -> str:
            digest = hashlib.sha256(f"{self.seed}/{next(numbers)}".encode()).hexdigest()
            return prefix + digest[: len(shape) - len(prefix)]

        return replace(self.form, new_id=new_id)

    def for_the_caller(self, calls: Iterable[Call]) -> bool:
        """Whether the caller has to run one of these calls."""
        names = {tool.name for tool in self.tools if tool.tool is None}
        return any(call.name in names for call in calls)


class _TurnWatch:
    """Hands on the calls of a turn, unless the turn ends the output."""

    def __init__(self, watch: Watch, turns: _Turns) -> None:
        self._watch, self._turns, self._rounds = watch, turns, 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        turns = self._turns
        calls = self._watch.feed(index, token_id, "" if token_id in turns.hidden else text)
        if not calls or self._rounds == turns.max_rounds or turns.for_the_caller(calls):
            return ()
        self._rounds += 1
        return calls


class _Turn:
    """One turn's text on its way to a person."""

    def __init__(self, turns: _Turns, form: Format | None, params: SamplingParams) -> None:
        self._turns = turns
        self._hidden = turns.hidden if params.skip_special_tokens else frozenset()
        stop = tuple(params.stop or ())
        self._text = TextStream(turns.tokenizer, stop, params.include_stop_str_in_output, skip_special_tokens=False)
        self._parser = form.parser() if form else None

    def feed(self, token_id: int) -> list[Piece]:
        if token_id in self._turns.ends or token_id in self._hidden or self._text.stopped is not None:
            return []
        return self._parse(self._text.add(token_id))

    def finish(self) -> list[Piece]:
        return self._parse(self._text.finish()) + (self._parser.finish() if self._parser else [])

    def _parse(self, text: str) -> list[Piece]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [Content(text)] if text else []


@final
class ChatReader:
    """Reads one chat's events: puts the pieces of its turns among them, and the messages into its output.

    `Token.text` and `CompletionOutput.text` stay as the model wrote them, markup included; what a person sees is `Content`.
    """

    def __init__(self, turns: _Turns, params: SamplingParams) -> None:
        self._turns, self._params = turns, params
        self._form = turns.own_format()
        self._turn = _Turn(turns, self._form, params)

    def read(self, event: Event) -> Iterator[Event | Piece]:
        match event:
            case Token():
                yield event
                yield from self._turn.feed(event.token_id)
            case Intercepted():
                yield from self._turn.finish()
                yield event
            case Resumed():
                self._turn = _Turn(self._turns, self._form, self._params)
                yield event
            case Finished():
                if not _is_paused(event.output.outputs[0]):
                    yield from self._turn.finish()
                yield replace(event, output=self.with_messages(event.output))

    def with_messages(self, output: RequestOutput) -> RequestOutput:
        """The output with its messages, and with the finish reason of a chat."""
        return replace(output, outputs=[self._completed(completion) for completion in output.outputs])

    def _completed(self, completion: CompletionOutput) -> CompletionOutput:
        messages: list[Message] = []
        form, start = self._turns.own_format(), 0
        for pause in completion.interceptions:
            if not pause.results:
                break
            content, calls = self._parsed(form, completion.token_ids[start : pause.span[0]])
            messages.append(_answer(content, calls))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                for call, result in zip(pause.calls, pause.results, strict=True)
            ]
            start = pause.span[1]
        content, calls = self._parsed(form, completion.token_ids[start:])
        reason, stop = completion.finish_reason, completion.stop_reason
        if reason != "stop":
            calls = []
        elif calls:
            reason, stop = "tool_calls", None if self._turns.for_the_caller(calls) else "max_rounds"
        messages.append(_answer(content, calls))
        return replace(completion, finish_reason=reason, stop_reason=stop, messages=tuple(messages))

    def _parsed(self, form: Format | None, token_ids: Sequence[int]) -> tuple[str, list[Call]]:
        turn = _Turn(self._turns, form, self._params)
        pieces = [piece for token in token_ids for piece in turn.feed(token)] + turn.finish()
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        return content, [piece.call for piece in pieces if isinstance(piece, CallEnded)]


def _answer(content: str, calls: Sequence[Call]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | {"tool_calls": [call_message(call) for call in calls]} if calls else message


def _is_paused(completion: CompletionOutput) -> bool:
    """Whether it ended while its calls ran."""
    return bool(completion.interceptions) and not completion.interceptions[-1].results


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
    variables = options.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping) or {"messages", "tools", "add_generation_prompt", "chat_template"} & {
        *variables
    }:
        raise RequestError(
            "chat_template_kwargs are what a template reads besides messages, tools and add_generation_prompt",
            got=repr(variables)[:80],
            fix='{"enable_thinking": False}, for example',
        )
    return max_rounds


def _format(name: str | None, template: str) -> Format:
    """How the model writes calls, by name or as its template shows."""
    if name is None:
        name = detect_format(template)
        if name is None:
            raise RequestError(
                "the model's chat template shows no format of calls that is known",
                got="tools",
                fix=f"leave tools out, or name its tool_call_parser: {', '.join(FORMATS)}",
            )
    if name not in FORMATS:
        raise RequestError("no such tool_call_parser", got=repr(name), fix=f"one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    """The special tokens among these texts."""
    encoded: list[list[int]] = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in tokenizer.special_ids]
