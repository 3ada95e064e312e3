"""`ChatTemplate`: writes a conversation as text and tokens with a model's own chat template.

A request that called keeps its tokens. Only the text that the template puts after them is added: the rest of the turn, the tool
messages, and the opening of the next turn. That text comes from a small stand-in conversation, so computed tokens stay although
the template would write the model's turn differently (without its reasoning, with other spaces in arguments). For a follow-up
request, marks in the conversation show what its template writes after a turn.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, final

from jinfercept.calls import Call
from jinfercept.chat.messages import (
    ARGUMENT_FORMS,
    WRITTEN_CALLS,
    Message,
    call_message,
    one_call_a_turn,
    with_arguments,
)
from jinfercept.chat.parsers.reasoning import REASONING_FORMATS
from jinfercept.chat.system_messages import (
    PROBE,
    SYSTEM_ROLES,
    shows_probe,
    simpler_forms,
    with_leading_system,
)
from jinfercept.chat.tokenizer.special_tokens import Rendered, SpecialTokenNames
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.written_tools import rendered_with_tools, usual_variables, with_written_tools, written_calls
from jinfercept.errors import RequestError, shown

_STAND_IN = ({"role": "user", "content": "?"},)
_MARK, _TURN, _NEXT = (f"@@{secrets.token_hex(8)}@@" for _ in range(3))  # no text of a client or a model has them
_REASONING = frozenset(tag for form in REASONING_FORMATS.values() for tag in (form.opening, form.closing))
_PLACE = re.compile(rf"{_MARK}-(\d+)(.*?){_MARK}", re.DOTALL)
_RESERVED = frozenset(
    {
        *("self", "messages", "conversations", "tools", "add_generation_prompt", "chat_template"),
        *("continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""Parameters of the function that renders templates, which cannot be variables of a template."""


@final
class ChatTemplate:
    """A model's template, with the tools that are declared to it.

    Raises:
        ModelError: there is no template.
        RequestError: it fails on a simple question, does not take the tools, or the variables are no mapping of free names.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],  # OpenAI-style declarations
        source: str | None,  # Jinja; None: the tokenizer's
        variables: Mapping[str, Any],
        end_token_ids: Sequence[int],  # those that end a turn
        special_tokens_in_text: bool = False,  # names of special tokens in given texts become these tokens
        # stand in a system message, because the template knows no tools
        written_tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if not isinstance(variables, Mapping) or _RESERVED & variables.keys():
            raise RequestError(
                "chat_template_kwargs are what a template reads besides messages, tools and add_generation_prompt",
                got=shown(variables),
                fix='{"enable_thinking": False}, for example',
            )
        self.tokenizer = tokenizer
        self.source = tokenizer.chat_template(bool(tools)) if source is None else source
        # templates with an equal `given` write the same text for the same messages
        self.given = (self.source, tools, variables, special_tokens_in_text, written_tools)
        self._names = tokenizer.special_token_names
        self._literal = (
            SpecialTokenNames(()) if special_tokens_in_text else self._names
        )  # that given texts have no tokens of
        self._written_tools = written_tools
        self._tools = self._literal.marked(tools)
        self._variables = self._literal.marked({**usual_variables(self.source, tools), **variables})
        self._ends = tuple(filter(None, map(tokenizer.token_text, end_token_ids)))
        self.end_token_ids = frozenset(end_token_ids)
        self._begun = rendered_with_tools(self._tools, partial(self._render_stand_in, is_given=source is not None))

    def _render_stand_in(self, tools: Sequence[Mapping[str, Any]], is_given: bool) -> str:
        self._tools = tools
        try:
            return self._apply([*_STAND_IN], add_generation_prompt=False)
        except RequestError as error:
            if not is_given:
                raise
            raise RequestError(
                "the chat_template that was given fails on a simple question",
                got=error.got,
                fix="correct the template, or leave it out for the model's own",
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> "Rendered":
        """Write a conversation in the first form that the template takes (`system_messages`).

        Raises `RequestError` if it takes none.
        """
        checked: list[Any] = [*messages]
        if any(message["role"] in SYSTEM_ROLES for message in checked[1:]) and not self._takes_system_anywhere:
            checked = with_leading_system(checked)
        num_calls = max((len(message.get("tool_calls", ())) for message in checked), default=0)
        if num_calls > 1 and self._num_calls_written == 1:
            checked = one_call_a_turn(checked)
        elif num_calls and not self._num_calls_written:
            checked = [
                message | {WRITTEN_CALLS: written_calls(self._literal.marked(message), self.source)}
                for message in checked
            ]
        try:
            return self._names.unmarked(self._apply(checked, add_generation_prompt))
        except RequestError:
            for form in simpler_forms(checked):
                with suppress(RequestError):
                    return self._names.unmarked(self._apply(form, add_generation_prompt))
            raise

    @cached_property
    def _takes_system_anywhere(self) -> bool:
        try:
            # some templates refuse later system messages, others move them or leave them out
            return shows_probe(self._apply([*PROBE], add_generation_prompt=True))
        except RequestError:
            return False

    @cached_property
    def _num_calls_written(self) -> int:
        """How many of two calls of a turn the template writes; two if it refuses them."""
        marks = ("7d3e", "9b1f")
        calls = [Call("call", json.dumps({"mark": f"@@{mark}"}), id=f"probe{mark}") for mark in marks]
        results = [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": "?"} for call in calls]
        try:
            written = self._with_turn(calls, results)
        except RequestError:
            return len(calls)
        return sum(f"@@{mark}" in written for mark in marks)

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            # the first form that the template takes counts: a model may have written any text as arguments
            return self._apply_form(with_arguments(messages, ARGUMENT_FORMS[0]), add_generation_prompt)
        except RequestError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            for form in ARGUMENT_FORMS[1:]:
                with suppress(RequestError):
                    return self._apply_form(with_arguments(messages, form), add_generation_prompt)
            raise

    def _apply_form(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        if self._written_tools:
            messages = with_written_tools(messages, self._written_tools)
            if not self._takes_system:
                messages = with_leading_system(messages, keeps_leading=False)
        return self._apply_template(messages, add_generation_prompt)

    @cached_property
    def _takes_system(self) -> bool:
        system, *_, user = PROBE
        try:
            # Gemma's templates refuse a system message
            self._apply_template([system, user], add_generation_prompt=True)
        except RequestError:
            return False
        return True

    def _apply_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [*map(self._given, messages)], self._tools, add_generation_prompt, self.source, **self._variables
            )
        except RequestError as error:
            raise RequestError(error.what, got=self._names.unmarked(str(error.got)), fix=error.fix) from error

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] != "assistant":
            return self._literal.marked(message)
        # the template looks for tags of reasoning, and of calls, in an assistant's content: they get no marks
        marked = self._literal.marked({**message, "content": ""})
        marked["content"] = self._literal.but(_REASONING).marked(message["content"]) + message.get(WRITTEN_CALLS, "")
        return marked

    def between(self, calls: Sequence[Call]) -> tuple[str, str]:
        """Return the text that ends a turn with `calls`, and the text after it up to the next turn, for `encode_results`.

        The calls need ids. Raises `RequestError` if the template has no place for the results of tools.
        """
        results = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": f'{_MARK}-{index}"\n{_MARK}'}
            for index, call in enumerate(calls)
        ]
        try:
            whole = self._with_turn(calls, results)
        except RequestError:
            if len(calls) < 2:
                raise
            whole = self._with_turn(calls[:1], results)
        begins = _common(whole, self._begun)
        place = _PLACE.search(whole)
        ends = [(whole.rfind(text, begins, place.start()), text) for text in self._ends] if place else []
        at, end = max(ends, default=(-1, ""))
        after = whole[at + len(end) :]
        if at < 0 or sorted(int(index) for index, _ in _PLACE.findall(after)) != list(range(len(calls))):
            raise RequestError(
                "the chat template has no place for the results of tools",
                got=self._names.unmarked(whole[begins:])[:200],
                fix="use one that ends a turn that calls, and knows the role tool",
            )
        return end, after

    def _with_turn(self, calls: Sequence[Call], results: list[dict[str, Any]]) -> str:
        turn = {"role": "assistant", "content": "", "tool_calls": [call_message(call) for call in calls]}
        return self._apply([*_STAND_IN, turn, *results], add_generation_prompt=True)

    @cached_property
    def keeps_reasoning(self) -> bool:
        """Whether the template writes the reasoning of a turn to which the user has replied."""
        turn = {"role": "assistant", "content": "?", "reasoning_content": _MARK, "reasoning": _MARK}
        try:
            return _MARK in self.render([*_STAND_IN, turn, *_STAND_IN])
        except RequestError:
            return False

    def behind_turn(self, messages: Sequence[Message], place: int, text: Rendered) -> Rendered | None:
        """Return the end of a turn and the text after it, as the template writes them; None if the template does not show them.

        They are looked for in a conversation that begins with the turn, and then in the whole one if its end differs.

        Args:
            place: of the turn, a message of the assistant before the last message.
            text: the messages as `render` has written them.
        """
        for before in (_STAND_IN, messages[:place]):
            if (told := self._shown_behind(before, messages[place:])) is not None:
                between, end, behind = told
                moved = messages[place + 1]["role"] == "user" and any(
                    json.dumps(tool["function"]["name"]) in between for tool in self._tools
                )  # the tools stand before the last message of the user
                if end and not moved and text.endswith(end + behind):
                    return text.since(len(text) - len(end + behind))
        return None

    def appended(self, messages: Sequence[Message]) -> tuple[str, Rendered]:
        """Return the end of a turn, and the text that makes messages follow it, however the template writes the turn itself.

        Of the turn, the first of `messages`, only its calls matter. Raises `RequestError` if the template does not show its
        end.
        """
        if (behind := self._shown_behind(_STAND_IN, messages)) is None:
            raise RequestError(
                "the chat template does not show where a turn ends and these messages begin",
                got=shown(messages[1:]),
                fix="begin with a message of text, or use a template that writes every turn behind the one before it",
            )
        return behind[1:]

    def _shown_behind(self, before: Sequence[Message], messages: Sequence[Message]) -> tuple[str, str, Rendered] | None:
        """Find the text that the template writes after a turn, by marks at the end of the turn and before the next content.

        Returns the text between the marks, the text that ends the turn ("" if no token does), and the text after that end. None
        if no form of the turn shows the marks.
        """
        turn, following, *rest = messages
        without_end = None
        for marked in _marked_turns(turn):
            try:
                whole = self.render([*before, marked, {**following, "content": _NEXT + following["content"]}, *rest])
            except RequestError:
                continue
            until, next_mark, _ = whole.partition(_NEXT)
            _, turn_mark, between = until.rpartition(_TURN)
            if not (turn_mark and next_mark):
                continue
            at, end = min(((at, end) for end in self._ends if (at := between.find(end)) >= 0), default=(0, ""))
            behind = whole.since(len(until) - len(between) + at + len(end)).without(_NEXT)
            if end:
                return between, end, behind
            without_end = between, end, behind
        return without_end

    def encode(self, text: str) -> list[int]:
        """Encode a text that `render` returned, or any text in which names of special tokens stand for these tokens."""
        return [token_id for ids in self.tokenizer.encode_segments(self.tokenizer.segments(text)) for token_id in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, with special ones by name."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode_results(self, end: str, after: str, contents: Sequence[str]) -> list[int]:
        """Encode the text that follows a turn with calls.

        `end` and `after` are from `between`; special names in results stay text.
        """
        pieces = _PLACE.split(after)
        texts = [pieces[0]]
        for index, probe, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            result = contents[int(index)]
            if not probe.startswith('"'):  # the template wrote the probe within a JSON string
                result = json.dumps(result, ensure_ascii=False)[1:-1]
            texts += [self._names.marked(result), text]
        tokens, before = self.encode(self._names.unmarked(end + "".join(texts))), self.tokenizer.encode(end)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self.encode(self._names.unmarked("".join(texts)))


def _marked_turns(turn: Message) -> list[dict[str, Any]]:
    *calls, last = turn.get("tool_calls") or [None]
    if last is None:
        return [{"role": "assistant", "content": _TURN}]
    marked = {**last, "function": {**last["function"], "arguments": json.dumps({_TURN: _TURN})}}
    # a template that does not show calls may show the mark in the content
    return [
        {"role": "assistant", "content": "", "tool_calls": [*calls, marked]},
        {"role": "assistant", "content": _TURN, "tool_calls": [*calls, last]},
    ]


def _common(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(text), len(other)))
