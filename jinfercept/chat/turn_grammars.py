"""The options `tool_choice` and `parallel_tool_calls` of a chat, and the grammars that enforce them.

Only the first turn has to call; later turns are free. A grammar begins after the turn's reasoning. Reasoning is free except for
the tokens that end a text, which are forbidden so that an answer follows unless the output is cut off.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np
from jaxtyping import UInt32

from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.grammar.constraint import TokenGrammar, words_of
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.grammar.schemas import SchemaReduction
from jinfercept.chat.parsers.hermes import answer_only, answer_or_calls
from jinfercept.chat.parsers.reasoning import Beginning, ReasoningFormat
from jinfercept.chat.parsers.tool_call_format import JSON_NAME, CallGrammar, Rules, ToolCallFormat
from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import Constraint, Grammar

log = logging.getLogger(__name__)

ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]
"""As OpenAI's `tool_choice`; with a mapping `{"type": "function", "function": {"name": …}}` the named tool has to be called."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_MOST_FAILED = 4
"""Tools whose grammars may fail before those of the others are not tried."""
_UNSOUND = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # raised for invalid schemas


@final
@dataclass(frozen=True, slots=True)
class TurnCalls:
    """A checked tool choice."""

    reads: bool  # text in the format of a call is a call
    must_call: frozenset[str]  # tools of which the first turn has to call one or several; may be empty
    parallel: bool  # a turn may have several calls
    once: bool = False  # the turn that has to call makes one call


def tool_choice(choice: ToolChoice | None, parallel: bool, tools: Sequence[ChatTool]) -> TurnCalls:
    """Check the options. Raises `RequestError` for unknown values, and for tools that are not declared."""
    if type(parallel) is not bool:
        raise RequestError("parallel_tool_calls must be true or false", got=shown(parallel), fix="True or False")
    names = frozenset(tool.name for tool in tools)
    match choice:
        case None | "auto" | "none":
            return TurnCalls(bool(names) and choice != "none", frozenset(), parallel)
        case "required":
            required = names
        case {"type": "function", "function": {"name": str(name)}}:
            required = frozenset({name})
        case _:
            raise RequestError(
                "tool_choice has an unknown value",
                got=shown(choice),
                fix='"auto", "none", "required", or {"type": "function", "function": {"name": …}}',
            )
    if not required or required - names:
        raise RequestError(
            "tool_choice names a tool that the request does not declare",
            got=f"{choice!r:.80}, tools {sorted(names)}",
            fix="declare it in tools",
        )
    return TurnCalls(True, required, parallel, once=choice != "required")


def compile_calls(
    choice: TurnCalls, form: ToolCallFormat, template: str, tokenizer: Tokenizer, grammars: Grammars
) -> TokenGrammar | None:
    """Compile the grammar of a turn that has to call; None if it need not. Raises `RequestError` if it cannot be enforced."""
    required = {name: schema for name, schema in (form.tools or {}).items() if name in choice.must_call}
    if not required:
        return None
    tools: dict[str, Mapping[str, Any]] = {}
    for name, schema in required.items():
        try:
            tools[name] = _enforceable(name, schema)
        except _UNSOUND as error:
            raise _unenforceable(f"a call of tool {name!r}", error) from error

    def compiled(some: Mapping[str, Mapping[str, Any]]) -> TokenGrammar:
        several = choice.parallel and not choice.once
        source = replace(form, tools=some).calls_grammar(_tokens(tokenizer), template, several)
        return grammars.compile(source)

    try:
        return compiled(tools)
    except _UNSOUND as error:
        for name, schema in tools.items():
            try:
                compiled({name: schema})
            except _UNSOUND as problem:
                raise _unenforceable(f"a call of tool {name!r}", problem) from problem
        raise _unenforceable("calls of these tools", error) from error


def compile_answer_or_calls(
    form: ToolCallFormat, parallel: bool, tokenizer: Tokenizer, grammars: Grammars
) -> TokenGrammar | None:
    """Compile the grammar of a turn in the format of Hermes that answers or calls; None if no tool can be called.

    If a tool's schema cannot be enforced, its arguments are any object; running the call reports what is wrong with them.
    """

    def compiled(tools: Mapping[str, Mapping[str, Any]]) -> TokenGrammar | None:
        calls = CallGrammar(Rules(), tools, _tokens(tokenizer), "", parallel)
        with suppress(*_UNSOUND):
            return grammars.compile(calls.rules.text(answer_or_calls(calls)))
        return None

    tools = {name: _loosened(name, schema) for name, schema in (form.tools or {}).items() if JSON_NAME.fullmatch(name)}
    if not tools:
        return None
    if (grammar := compiled(tools)) is not None:
        return grammar
    num_failed = 0  # a grammar that fails may take half a second
    for name, schema in tools.items():
        if num_failed == _MOST_FAILED or compiled({name: schema}) is None:
            num_failed = min(num_failed + 1, _MOST_FAILED)
            tools[name] = _ANY_OBJECT
    return compiled(tools) or compiled(dict.fromkeys(tools, _ANY_OBJECT))


def compile_answer(grammars: Grammars) -> TokenGrammar:
    """Compile the grammar of a turn without calls in the format of Hermes."""
    rules = Rules()
    return grammars.compile(rules.text(answer_only(rules)))


def _loosened(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return _enforceable(name, schema)
    except _UNSOUND:
        return _ANY_OBJECT


def _enforceable(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reduction = SchemaReduction(checked_later=True)
    reduced = reduction.reduce(schema)
    if reduction.unenforced:
        _log_unenforced(name, tuple(reduction.unenforced))
    return reduced


@lru_cache(maxsize=256)
def _log_unenforced(name: str, places: tuple[str, ...]) -> None:
    log.info(
        "arguments of tool %.80r are checked when it is run, not while they are written: %.300r",
        name,
        ", ".join(places),
    )


def _tokens(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    def token_of(tag: str) -> int | None:
        token_ids = tokenizer.encode(tag)
        return token_ids[0] if len(token_ids) == 1 else None

    return token_of


def _unenforceable(what: str, error: Exception) -> RequestError:
    fix = 'simplify the schema of its parameters, or leave the call to the model (tool_choice="auto")'
    if not isinstance(error, RequestError):
        problem = f"{type(error).__name__}: {error}"
    elif isinstance(error.__cause__, ValueError):  # the message of llguidance, without the position
        problem = re.split(r" \d+ \| ", re.sub(r"^at \d+\(\d+\): ", "", str(error.__cause__)))[0]
    else:
        problem, fix = f"{error.what}: {error.got}", error.fix
    return RequestError(f"tool_choice cannot enforce {what}", got=problem[:300], fix=fix)


@final
class PerTurnGrammar:
    """A `Grammar` for one request."""

    def __init__(
        self,
        grammars: tuple[Grammar | None, Grammar | None],  # of its first turn, and of all others; None: the turn is free
        beginnings: tuple[Beginning, Beginning],  # of the first turn, and of all others
        reasoning: ReasoningFormat | None,  # a grammar begins after it
        tokenizer: Tokenizer,
    ) -> None:
        self._given = grammars, beginnings, reasoning, tokenizer
        self._turn = 0

    def anew(self) -> "PerTurnGrammar":
        """Copy the grammar for another request, whose first turn is still to come."""
        return PerTurnGrammar(*self._given)

    def constrain(self, end_token_ids: frozenset[int]) -> Constraint | None:
        grammars, beginnings, reasoning, tokenizer = self._given
        grammar, beginning = grammars[self._turn], beginnings[self._turn]
        self._turn = 1
        if grammar is None:
            return None
        if reasoning is None or beginning == "answering":
            return grammar.constrain(end_token_ids)
        return _ReasoningConstraint(grammar, reasoning, beginning, tokenizer, end_token_ids)


class _ReasoningConstraint:
    """An undecided turn may begin with reasoning or with its answer."""

    def __init__(
        self,
        grammar: Grammar,
        format: ReasoningFormat,
        beginning: Beginning,
        tokenizer: Tokenizer,
        ends: frozenset[int],
    ) -> None:
        self._grammar, self._at, self._tokenizer, self._ends = grammar, beginning, tokenizer, ends
        self._opening, self._closing = tokenizer.encode(format.opening), format.closing
        self._answer = self._begin()
        self._may_answer = True  # undecided: the text so far may begin an answer too
        self._num_opened = 0  # tokens of the opening mark
        self._detokenizer, self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ""
        self.ended = False

    def _begin(self) -> Constraint:
        answer = self._grammar.constrain(self._ends)
        assert answer is not None, "no constraint behind the reasoning"
        return answer

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        words = self._answer.allowed()
        if self._at == "answering":
            self.ended = self._answer.ended
            return words
        if self._at == "thinking":
            return ~words_of(self._ends, 32 * len(words))
        opening = words_of(self._opening[self._num_opened : self._num_opened + 1], 32 * len(words))
        return words | opening if self._may_answer else opening

    def accept(self, token_id: int) -> None:
        if self._at == "thinking":
            self._think(token_id)
        elif self._at == "undecided" and token_id == self._opening[self._num_opened]:
            self._open(token_id)
        else:
            self._at = "answering"
            self._accept(token_id)

    def _open(self, token_id: int) -> None:
        self._num_opened += 1
        if self._num_opened == len(self._opening):
            self._at, self._answer = "thinking", self._begin()
        # an answer may begin like the opening mark
        elif self._may_answer and self._answer.allowed()[token_id // 32] >> token_id % 32 & 1:
            self._answer.accept(token_id)
        else:
            self._may_answer = False

    def _think(self, token_id: int) -> None:
        self._text += self._detokenizer.add(token_id)
        _, mark, after = self._text.partition(self._closing)
        self._text = self._text[1 - len(self._closing) :]
        if mark:
            self._at = "answering"
            for answer_id in self._tokenizer.encode(after.lstrip(), plain=True):
                self._accept(answer_id)

    def _accept(self, token_id: int) -> None:
        self._answer.accept(token_id)
        self.ended = self._answer.ended
