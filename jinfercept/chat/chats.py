"""`ChatPlan`: makes requests from conversations, each with a transcript that reads its turns.

A turn with calls is a pause: the request keeps its tokens, reads the results as its template writes them, and continues. The
engine runs all of that. What several bodies have in common is made once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

from jinfercept.calls import Call, CallMode, Result, Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatTool
from jinfercept.chat.futures import Futures
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.memory import ChatMemory, Conversation, GivenTokens
from jinfercept.chat.messages import Message, call_ids, checked_message, results_behind_calls
from jinfercept.chat.options import (
    MAX_ROUNDS,
    ChatOptions,
    checked_options,
    reasoning_format,
    text_format,
    tool_call_format,
)
from jinfercept.chat.parsers.reasoning import Beginning, ReasoningFormat
from jinfercept.chat.parsers.tool_call_format import ToolCallFormat
from jinfercept.chat.requests import check_chars, compiled_params, params_of_each
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.transcript import ChatTranscript, ChatTurns, Note
from jinfercept.chat.turn_grammars import (
    PerTurnGrammar,
    TurnCalls,
    compile_answer,
    compile_answer_or_calls,
    compile_calls,
    tool_choice,
)
from jinfercept.chat.written_tools import FORMAT, are_written
from jinfercept.engine.parallel_sampling import forks
from jinfercept.engine.rendering import CHARS_PER_TOKEN
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import Grammar
from jinfercept.request import Request
from jinfercept.sampling_params import MAX_BIASED_TOKENS, SamplingParams

DEFAULT_PARAMS = SamplingParams(max_tokens=1024)
"""Defaults of a chat; a completion's 16 tokens would end most answers early."""


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list of messages."""
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


@final
class ChatPlan:
    """The tools, options and template of a chat. Chats with equal ones share a plan.

    Raises:
        RequestError: tools or options are invalid, or the template does not take them.
        ModelError: the model has no chat template.
    """

    def __init__(
        self,
        tools: Sequence[ChatTool],  # those that the model may call
        options: ChatOptions,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
        eos_token_ids: Sequence[int],  # tokens that end a turn
    ) -> None:
        if tokenizer is None:
            fix = "generate from prompt_token_ids"
            raise RequestError("a chat needs a tokenizer", got="a model without one", fix=fix)
        self._options = options = checked_options(options)
        self._tokenizer = tokenizer
        calls_run = options.get("async_calls")
        declared = [_with_mode(tool, calls_run.calls) if calls_run else tool for tool in tools]
        if futures := Futures.of(declared, calls_run or AsyncCalls()):
            declared.append(futures.waiting_tool)
        choice = tool_choice(options.get("tool_choice"), options.get("parallel_tool_calls", True), declared)
        offered = declared if choice.reads else []
        run = {tool.name: futures.tools[tool.name] if futures else tool.tool for tool in offered if tool.tool}
        source = options.get("chat_template") or tokenizer.chat_template(tools=bool(declared))
        # the template cannot declare the tools, so a system message does
        self.is_written = bool(declared) and are_written(choice, options.get("tool_call_parser"), source)
        parser = FORMAT if self.is_written else options.get("tool_call_parser")
        form = tool_call_format(parser, source, declared) if choice.reads else text_format(parser, source)
        ends = tuple(dict.fromkeys([*eos_token_ids, *_tokens_of(form.turn_ends if form else (), tokenizer)]))
        declarations = [tool.declaration for tool in declared if not tool.is_deferred]
        self._template = template = ChatTemplate(
            tokenizer,
            declarations,
            options.get("chat_template"),
            options.get("chat_template_kwargs") or {},
            ends,
            options.get("special_tokens_in_text", False),
            declarations if self.is_written else [],
        )
        reasoning = reasoning_format(options.get("reasoning_parser", "auto"), template.source)
        later = _later_beginning(template, reasoning, run)
        marks = [
            *(form.tags if form else ()),
            *((reasoning.opening, reasoning.closing) if reasoning else ()),
        ]
        self._turns = ChatTurns(
            tokenizer=tokenizer,
            form=form,
            reasoning=reasoning,
            beginnings=(later, later),
            ends=ends,
            markup=frozenset(_tokens_of(marks, tokenizer)),
            tools=offered,
            max_rounds=options.get("max_rounds", MAX_ROUNDS),
            must_call=bool(choice.must_call),
            parallel=choice.parallel,
            futures=futures,
        )
        self._tools, self._grammars = run, grammars
        self._answers = options.get("add_generation_prompt", True)
        self._first, self._free = _turn_grammars(choice, form, self.is_written, template.source, tokenizer, grammars)
        limits = {name: tool.max_result_tokens for name, tool in run.items()}
        self._renderer = ToolMessages(template, tokenizer, limits) if form else None
        may_answer = choice.reads and not choice.must_call
        self._opening = tokenizer.encode(form.tags[0])[0] if may_answer and form and form.tags else None

    def requests(
        self,
        ids: Iterable[str],
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        memory: ChatMemory,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        given: GivenTokens | None = None,
        tenant: str = "",
        salt: str = "",
        call_bias: float = 0.0,
    ) -> list[Request]:
        """Make one request per conversation and output.

        Args:
            ids: names for the requests, at least as many as conversations.
            conversations: one list of messages, or several.
            memory: has the earlier conversations that these may continue.
            given: the tokens of the beginning of a single conversation, in place of the remembered ones.
            salt: of their pages.
            call_bias: added to the logit of the token that opens a call, where the model may answer or call. It is ignored if
                the parameters have their own bias for the token, or no room for another bias.

        Raises:
            RequestError: messages or parameters are invalid, or the template does not take the messages.
        """
        listed = [[checked_message(message) for message in messages] for messages in _conversations(conversations)]
        all_params = params_of_each(DEFAULT_PARAMS if params is None else params, len(listed))
        requests: list[Request] = []
        for request_id, messages, own in zip(ids, listed, all_params, strict=False):
            if given is None:  # else the messages have their places in the given tokens
                messages = results_behind_calls(messages)
            text = self._template.render(messages, self._answers)
            if (max_chars := self._options.get("max_prompt_chars")) is not None:
                check_chars(text, max_chars)
            note = None
            if given is not None:
                prompt = given.prompt(self._template, messages)
            else:
                prompt = memory.prompt(self._template, messages, text, tenant, salt, own.max_tokens or 1)
                if self._answers:
                    note = partial(memory.remember, prompt)
            requests += self._forks(request_id, messages, own, prompt, note, call_bias)
        return requests

    def _forks(
        self,
        request_id: str,
        messages: Sequence[Message],
        params: SamplingParams,
        prompt: Conversation,
        note: Note | None,
        call_bias: float,
    ) -> list[Request]:
        turns = self._turns
        first = turns.reasoning.beginning(prompt.text) if turns.reasoning else turns.beginnings[1]
        turns = replace(turns, beginnings=(first, turns.beginnings[1]), used_ids=call_ids(messages))
        params, own = compiled_params(params, self._tokenizer, self._grammars)
        biases, opening = params.logit_bias or {}, self._opening
        if call_bias and opening is not None and opening not in biases and len(biases) < MAX_BIASED_TOKENS:
            params = replace(params, logit_bias={**biases, opening: call_bias})
        request = Request(
            request_id,
            prompt.token_ids,
            params,
            self._tools,
            prompt=prompt.text,
            transcript=partial(ChatTranscript, turns, note=note),
            render=self._renderer,
            ids_below=self._tokenizer.ids_below,
        )
        return [replace(fork, grammar=self._grammar(params, own, turns)) for fork in forks(request)]

    def _grammar(self, params: SamplingParams, own: Grammar | None, turns: ChatTurns) -> PerTurnGrammar | None:
        if self._first is not None and params.ignore_eos:
            what = "ignore_eos cannot be combined with a tool_choice that demands a call"
            raise RequestError(what, got="ignore_eos", fix="leave it out")
        own = own or (None if params.ignore_eos else self._free)
        if (first := self._first or own) is None:
            return None
        return PerTurnGrammar((first, own), turns.beginnings, turns.reasoning, turns.tokenizer)


def _turn_grammars(
    choice: TurnCalls,
    form: ToolCallFormat | None,
    written: bool,
    source: str,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
) -> tuple[Grammar | None, Grammar | None]:
    # the first grammar holds for a first turn that has to call, the second for all turns where tools are written as text
    if written and not choice.reads and grammars is not None:
        return None, compile_answer(grammars)
    if form is None or grammars is None:
        return None, None
    calls = compile_calls(choice, form, source, tokenizer, grammars)
    if calls is not None or not written:
        return calls, None
    return None, compile_answer_or_calls(form, choice.parallel, tokenizer, grammars)


def _with_mode(tool: ChatTool, mode: CallMode) -> ChatTool:
    if tool.tool is None or tool.tool.calls is not None:
        return tool
    return replace(tool, tool=replace(tool.tool, calls=mode))


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if is_conversation(messages):
        return [messages]
    # An empty tuple is no conversations; an empty list may be one without messages.
    if not isinstance(messages, list | tuple) or messages == [] or not all(map(is_conversation, messages)):
        raise RequestError(
            "a chat must be a list of messages, or a list of such lists",
            got=shown(messages),
            fix='[{"role": "user", "content": "…"}]',
        )
    return list(messages)


def _later_beginning(
    template: ChatTemplate, reasoning: ReasoningFormat | None, executed: Mapping[str, Tool]
) -> Beginning:
    if not executed:
        return "undecided"
    _, after = template.between([Call(next(iter(executed)), "{}", id="123456789")])
    return reasoning.beginning(after) if reasoning else "undecided"


def _tokens_of(texts: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    encoded: list[list[int]] = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in tokenizer.special_ids]


@final
class ToolMessages:
    """A `Renderer` that writes the results of a turn's calls as the template's tool messages."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, max_tokens: Mapping[str, int]) -> None:
        # limits by name of the tool: a longer result is cut within its message, with a note; placeholders are never cut
        self._template, self._tokenizer, self._max_tokens = template, tokenizer, max_tokens

    def render(
        self, calls: tuple[Call, ...], results: tuple[Result, ...], room: int
    ) -> tuple[list[int], tuple[Result, ...]]:
        end, after = self._template.between(calls)
        tools = (None if result.status == "started" else call.name for call, result in zip(calls, results, strict=True))
        limits = [self._max_tokens.get(name, room) if name is not None else room for name in tools]
        # where there is too little room, all results are cut to the same length
        share = max(limits)
        while True:
            cut = tuple(self._cut(result, min(limit, share)) for result, limit in zip(results, limits, strict=True))
            tokens = self._template.encode_results(end, after, [result.text for result in cut])
            if len(tokens) <= room or share <= 0:
                return tokens[:room], cut
            share = min(share, max(len(self._tokenizer.encode(result.text, plain=True)) for result in cut))
            share = max(0, share - -(-(len(tokens) - room) // len(cut)))

    def _cut(self, result: Result, limit: int) -> Result:
        text = self._tokenizer.decode(result.token_ids) if result.token_ids is not None else result.text
        if len(text) <= CHARS_PER_TOKEN * limit and len(self._tokenizer.encode(text, plain=True)) <= limit:
            return replace(result, text=text)
        note = f" ... (cut: longer than {limit} tokens)" if limit else ""
        body = self._tokenizer.encode(text[: CHARS_PER_TOKEN * limit], plain=True)
        room = max(0, limit - len(self._tokenizer.encode(note, plain=True)))
        status = "too_large" if result.status == "ok" else result.status
        return replace(result, text=self._tokenizer.decode(body[:room]) + note, status=status)
