"""Asynchronous calls in context markup language: finds calls and traps in a request's tokens, and writes results as interrupts.

Each delimiter is a single token where the vocabulary has all five; otherwise it is text, which tokens divide in any way.
`markup_prompt` is a few-shot prompt for models that were not trained on it: four worked examples show independent calls, prose
between a call and its result, a call that needs an earlier result, and an error. Try whether a model follows them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, final

from jinfercept.calls import Call, CallMode, Result, Tool
from jinfercept.chat.detector import TokenOwners
from jinfercept.chat.function_tools import ChatTool, ChatToolLike, chat_tools
from jinfercept.chat.parsers.cml import (
    DELIMITERS,
    MAX_DELIMITER_CHARS,
    CallFrame,
    CMLParser,
    Delimiters,
    Frame,
    Mark,
    escape,
)
from jinfercept.chat.parsers.python_calls import UNREADABLE, parse_call
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.engine.rendering import CHARS_PER_TOKEN, render, with_known_ids
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import BadFrame, SharedLimit, TrapFrame

OnEnd = Literal["wait", "cancel"]
"""What an end of text does while calls are pending: wait for them as a trap does, or cancel them."""

MAX_PENDING = 128
"""Default limit of a request's pending calls."""
TAIL_TOKENS = 32
"""Tokens at the end of a prompt among which a mark of reasoning is looked for, white space behind it included."""
NO_ID = "?"
"""The id of an interrupt that answers markup without one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCalls:
    """How a request's calls in context markup language are written, run and waited for.

    Attributes:
        calls: when a call runs, unless its tool says so itself. "async": at its `[END]`, while the model goes on; "parallel":
            at the next trap, together with all others; "sync": at its `[END]`, and the request waits for it.
        on_end: what an end-of-text token does while calls are pending. A stop string, a stop token that the request names, and
            the token limit always cancel them.
        max_pending: calls that run at once; a call beyond this limit is answered with an error.
        delimiters: their texts.
        reasoning: name of the marks of reasoning, inside which delimiters are plain text; None: the model writes no reasoning.
        shared_limit: limits the pending calls of several requests together; None: no such limit.
    """

    calls: CallMode = "async"
    on_end: OnEnd = "wait"
    max_pending: int = MAX_PENDING
    delimiters: Delimiters = DELIMITERS
    reasoning: str | None = "qwen3"
    shared_limit: SharedLimit | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("calls", self.calls, ("sync", "parallel", "async")),
            ("on_end", self.on_end, ("wait", "cancel")),
            ("reasoning", self.reasoning, (None, *REASONING_FORMATS)),
        ):
            if value not in choices:
                raise RequestError(f"{name} of AsyncCalls is unknown", got=shown(value), fix=f"one of {choices}")
        if type(self.max_pending) is not int or self.max_pending < 1:
            raise RequestError("max_pending is a whole number from 1", got=shown(self.max_pending), fix="such as 8")
        if (
            not isinstance(self.delimiters, Delimiters)
            or not all(isinstance(text, str) for text in self.delimiters)
            or not self.delimiters.are_distinct
        ):
            raise RequestError(
                f"delimiters have 2 to {MAX_DELIMITER_CHARS} characters and no backslash, and none contains another one or the "
                "beginning of one at its end",
                got=shown(self.delimiters),
                fix="leave them out, or give Delimiters(call=…, head=…, end=…, trap=…, interrupt=…)",
            )


@final
class ContextMarkup:
    """The markup of requests to one model with the same tools."""

    def __init__(
        self,
        options: AsyncCalls,
        tools: Mapping[str, Tool],  # by name; their functions take a JSON object as text
        parameters: Mapping[str, Sequence[str]],  # names of each tool's parameters, in order
        tokenizer: Tokenizer,
    ) -> None:
        self.on_end: OnEnd = options.on_end
        self.max_pending, self.shared_limit = options.max_pending, options.shared_limit
        self._options, self._tools, self._parameters = options, tools, parameters
        self.tokenizer = tokenizer
        self._marks = special_marks(options.delimiters, tokenizer)

    @cached_property
    def interrupt_token_id(self) -> int | None:
        """The token that begins an interrupt, which the model may not write; None: the delimiter is text."""
        return next((token_id for token_id, mark in self._marks.items() if mark == "interrupt"), None)

    def watch(self, prompt: str | None, prompt_token_ids: Sequence[int]) -> "ContextMarkupWatch":
        if prompt is None:
            prompt = self.tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
        name = self._options.reasoning
        reasoning = REASONING_FORMATS[name] if name else None
        return ContextMarkupWatch(self._options.delimiters, self._marks, self._parameters, reasoning, prompt)

    def mode(self, call: Call) -> CallMode:
        tool = self._tools.get(call.name)
        return (tool and tool.calls) or self._options.calls

    def kept(self, call: Call, result: Result) -> Result:
        tool = self._tools.get(call.name)
        if tool is None:
            return result
        # one character more than an interrupt holds shows that the result is longer
        ids = result.token_ids and result.token_ids[: tool.max_result_tokens + 1]
        return replace(result, text=result.text[: CHARS_PER_TOKEN * tool.max_result_tokens + 1], token_ids=ids)

    def interrupt(self, call: Call, result: Result, room: int) -> tuple[list[int], Result]:
        delimiters, tool = self._options.delimiters, self._tools.get(call.name)
        # the call of markup that called nothing has only an id
        shown_id = escape(call.id, delimiters) or NO_ID
        head = self._encode(f"{delimiters.interrupt} {shown_id} {delimiters.head}")
        tail = self._encode(f" {delimiters.end}")
        result = with_known_ids(result, self.tokenizer.vocab_size)
        text = result.text if result.token_ids is None else self.tokenizer.decode(result.token_ids)
        template = replace(tool, result=f" {tool.result}") if tool else Tool(str, name="markup", result=" {}")
        escaped = replace(result, text=escape(text, delimiters), token_ids=None)
        body_room = max(0, room - len(head) - len(tail))
        body, used = render(escaped, template, body_room, self.tokenizer.vocab_size, self._encode)
        return [*head, *body, *tail][:room], replace(result, status=used.status)

    def _encode(self, text: str) -> list[int]:
        if not self._marks:
            return self.tokenizer.encode(text, plain=True)
        # the vocabulary has the delimiters: each must become its own token
        ids = {getattr(self._options.delimiters, mark): token_id for token_id, mark in self._marks.items()}
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, ids))})", text):
            tokens += [ids[part]] if part in ids else self.tokenizer.encode(part, plain=True)
        return tokens


def special_marks(delimiters: Delimiters, tokenizer: Tokenizer) -> dict[int, Mark]:
    """Map token ids to delimiters. Empty unless every delimiter is a token of its own."""
    ids = [tokenizer.added_token_id(text) for text in delimiters]
    fields: tuple[Mark, ...] = Delimiters._fields  # pyright: ignore[reportAssignmentType]
    return {} if None in ids else dict(zip(ids, fields, strict=True))  # pyright: ignore[reportReturnType]


@final
class ContextMarkupWatch:
    """Finds the calls and traps of one request in its generated tokens. `marks` is empty if delimiters are text."""

    def __init__(
        self,
        delimiters: Delimiters,
        marks: Mapping[int, Mark],
        parameters: Mapping[str, Sequence[str]],
        reasoning: ReasoningFormat | None,
        prompt: str,
    ) -> None:
        thinking = reasoning is not None and reasoning.beginning(prompt) == "thinking"
        self._parser = CMLParser(delimiters, written=not marks, reasoning=reasoning, thinking=thinking)
        self._delimiters, self._marks, self._parameters = delimiters, marks, parameters
        self._ids: set[str] = set()
        self._owners = TokenOwners()  # those that add text

    @property
    def clean(self) -> bool:
        return self._parser.clean

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call | TrapFrame | BadFrame, ...]:
        mark = self._marks.get(token_id)
        length = len(text) if mark is None else len(getattr(self._delimiters, mark))
        if not length:
            return ()
        self._owners.add(index, length)
        frames = self._parser.feed(text) if mark is None else self._parser.feed_mark(mark)
        return tuple(map(self._read_frame, frames))

    def end(self) -> tuple[BadFrame, ...]:
        return tuple(frame._replace(span=self._owners.span(*frame.span)) for frame in self._parser.end())

    def _read_frame(self, frame: Frame) -> Call | TrapFrame | BadFrame:
        frame = frame._replace(span=self._owners.span(*frame.span))
        if not isinstance(frame, CallFrame):
            return frame
        if frame.id in self._ids:
            return BadFrame(frame.id, f"the id {frame.id!r} belongs to an earlier call", frame.span)
        self._ids.add(frame.id)
        name = frame.code.partition("(")[0].strip()
        if name not in self._parameters and "(" in frame.code:
            names = ", ".join(sorted(self._parameters)) or "none"
            return BadFrame(frame.id, f"no tool {name[:MAX_SHOWN]!r} (there are: {names})", frame.span)
        try:
            name, arguments = parse_call(frame.code, self._parameters)
        except UNREADABLE as error:
            shown = frame.code[:MAX_SHOWN]
            return BadFrame(frame.id, f"{shown!r} is no call of a tool with literal arguments: {error}", frame.span)
        return Call(name, arguments, frame.span, id=frame.id)


MAX_SHOWN = 80
"""Characters of a call that an error message repeats."""


STOP = "###"
"""Stands behind every example; a stop string for the answer."""

_HEAD = """\
Answer each request with its tools. A call is {call} id {head} tool(argument=value) {end} with a new id. \
{trap} {end} waits for all results. A result comes as {interrupt} id {head} result {end}; never write one yourself.
"""

_EXAMPLES = """
Tools:
population(city="..."): Inhabitants of a city.
Request: Which has more people, Oslo or Rome?
Answer:
{call} 1 {head} population(city="Oslo") {end}
{call} 2 {head} population(city="Rome") {end}
{trap} {end}
{interrupt} 1 {head} 717710 {end}{interrupt} 2 {head} 2755309 {end}
Rome has more people: 2755309, and Oslo has 717710.
{stop}

Tools:
weather(place="...", day=0): The weather at a place, in so many days.
Request: How will the weather be in Bergen tomorrow?
Answer:
{call} 1 {head} weather(place="Bergen", day=1) {end}
I look up the forecast for Bergen.
{trap} {end}
{interrupt} 1 {head} rain, 9 degrees {end}
Tomorrow it rains in Bergen, at 9 degrees.
{stop}

Tools:
author(book="..."): Who wrote a book.
born(person="..."): The year in which a person was born.
Request: When was the author of Emma born?
Answer:
{call} 1 {head} author(book="Emma") {end}
{trap} {end}
{interrupt} 1 {head} Jane Austen {end}
{call} 2 {head} born(person="Jane Austen") {end}
{trap} {end}
{interrupt} 2 {head} 1775 {end}
Jane Austen, the author of Emma, was born in 1775.
{stop}

Tools:
stock(item="..."): How many of an item there are.
Request: How many lamps and chairs are there?
Answer:
{call} 1 {head} stock(item="lamp") {end}
{call} 2 {head} stock(item="chair") {end}
{trap} {end}
{interrupt} 1 {head} 7 {end}{interrupt} 2 {head} error: no such item {end}
There are 7 lamps. I could not find out how many chairs there are.
{stop}
"""

_VALUES = {"string": '"..."', "integer": "0", "number": "0.0", "boolean": "True", "array": "[]", "object": "{}"}
"""How an argument is written, by the type of its schema."""


def markup_prompt(tools: Iterable[ChatToolLike], request: str, delimiters: Delimiters = DELIMITERS) -> str:
    """Write a prompt for `LLM.generate(…, tools=…, async_calls=…)`. The answer begins at its end; generate with `stop=STOP`.

    Raises `RequestError` if a tool is invalid, two tools have the same name, or the request is no text.

    Args:
        tools: the tools that the model may call, as a chat takes them.
        request: the user's request. Delimiters in it are escaped.
    """
    if not isinstance(request, str) or not request.strip():
        raise RequestError("request must be a text that is not empty", got=shown(request), fix="say what is wanted")
    words = {**delimiters._asdict(), "stop": STOP}
    declared = "\n".join(map(_line, chat_tools(tools)))
    return f"{(_HEAD + _EXAMPLES).format_map(words)}\nTools:\n{declared}\nRequest: {escape(request, delimiters)}\nAnswer:\n"


def _line(tool: ChatTool) -> str:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    arguments = ", ".join(f"{name}={_VALUES.get(schema.get('type'), '...')}" for name, schema in properties.items())
    description = " ".join(str(tool.declaration["function"].get("description") or "").split())
    return f"{tool.name}({arguments}): {description}" if description else f"{tool.name}({arguments})"
