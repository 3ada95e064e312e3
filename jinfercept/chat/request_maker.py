"""`RequestMaker`: turns prompts and conversations for one model into requests."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache, partial
from hashlib import sha256
from itertools import count
from typing import Any, final

from jinfercept.calls import Tool
from jinfercept.chat import chats
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.chat.grammar.grammar import Grammars, num_compiled_bytes
from jinfercept.chat.memory import ChatMemory, GivenTokens
from jinfercept.chat.options import ChatArguments, ChatOptions, checked_options, prompt_options
from jinfercept.chat.requests import (
    MarkedTools,
    checked_tools,
    listed_prompts,
    one_each,
    params_of_each,
    request_of,
    text_detector,
)
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.written_tools import log_written_tools
from jinfercept.config import AdapterOptions
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.parallel_sampling import forks
from jinfercept.errors import RequestError, shown
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.values import plain


@final
class RequestMaker:
    """Makes requests. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,  # of the model; None without one
        grammars: Grammars | None,  # None without a tokenizer
        end_token_ids: Sequence[int],
        max_model_len: int,  # of the tokens of a chat that a follow-up may continue
        sampling_defaults: Mapping[str, Any],  # fields of `SamplingParams` for prompts without parameters
        check_process: Callable[[], None],  # raises in a forked child, where a tokenizer may hang
        adapters: AdapterTable,
        # the adapter for chats with tools that name none, and the bias of their calls
        adapter_options: AdapterOptions = AdapterOptions(),  # noqa: B008 # frozen
    ) -> None:
        self.tokenizer, self._grammars, self._end_token_ids = tokenizer, grammars, end_token_ids
        self._max_model_len, self._sampling_defaults = max_model_len, sampling_defaults
        self._check_process = check_process
        self._adapters = adapters
        self._tool_lora, self._call_bias = adapter_options.tool_lora, adapter_options.call_bias
        self._ids = map("request-{}".format, count())
        self._note_written_tools = cache(log_written_tools)
        self.forget_chats()

    def forget_chats(self) -> None:
        """Forget earlier chats, their plans and their tokens, because the pages of their contexts are gone."""
        self._memory = ChatMemory(self._max_model_len)

    def make_requests(
        self,
        prompts: Any,
        params: Any,
        tools: Iterable[Tool | ChatTool] | None,
        detector: Any,
        ids: Iterable[str] | None = None,
        tenant: str = "",
        async_calls: AsyncCalls | None = None,
        lora: str | Iterable[str | None] | None = None,
    ) -> list[Request]:
        """Make the requests of `LLM.generate`, several for a prompt with `n` outputs.

        Args:
            ids: names, one for each prompt; None: generated.
            tools: a `ChatTool` is called in markup.
            tenant: owner of the compiled grammars.
            async_calls: how tools without a start text are called, in markup; None: only if a tool asks for it.
            lora: names of adapters, one for all or one for each prompt.
        """
        self._check_process()
        tokenizer, grammars = self.tokenizer, self._grammars and self._grammars.of(tenant)
        listed = listed_prompts(prompts)
        all_params = params_of_each(self.default_params(is_chat=False) if params is None else params, len(listed))
        checked, marked = checked_tools(tools), None
        if async_calls is not None or any(isinstance(tool, ChatTool) or tool.calls == "async" for tool in checked):
            marked = MarkedTools.of(checked, AsyncCalls() if async_calls is None else async_calls, tokenizer, grammars)
        by_name = {tool.name: tool for tool in checked if isinstance(tool, Tool)}
        by_name |= marked.tools if marked else {}
        if detector is None and by_name and (marked is None or any(tool.start for tool in by_name.values())):
            detector = text_detector(by_name, tokenizer)
        detectors = one_each(detector, None, len(listed), "detector")
        for own in detectors:
            if own is not None and not callable(getattr(own, "watch", None)):
                raise RequestError("a detector has a method watch()", got=shown(own), fix="see hooks.Detector")
        new_requests = list[Request]()
        adapters = one_each(lora, str, len(listed), "lora")
        rows = zip(ids or self._ids, listed, all_params, detectors, adapters, strict=False)
        for request_id, prompt, own_params, own_detector, name in rows:
            request = request_of(request_id, prompt, own_params, own_detector, by_name, tokenizer, grammars)
            new_requests.append(self.with_adapter(marked.added_to(request) if marked else request, name))
        return [fork for request in new_requests for fork in forks(request)]

    def make_chats(
        self,
        messages: Any,
        params: Any,
        tools: Any,
        options: ChatOptions,
        ids: Iterable[str] | None = None,
        tenant: str = "",
        salt: str = "",
        tokens: GivenTokens | None = None,
    ) -> list[Request]:
        """Make the requests of `LLM.chat`, several for a conversation with `n` outputs.

        Args:
            salt: of their pages.
            tokens: of the leading messages of a single conversation; None: earlier chats with these messages are continued.
        """
        self._check_process()
        params = self.default_params(is_chat=True) if params is None else params
        declared = chat_tools(tools)
        name = options.get("lora")
        if name is None and declared and self._tool_lora in self._adapters.names:
            name = self._tool_lora
        is_for_tools = name is not None and name == self._tool_lora  # trained to call
        plan = self._plan(declared, options, tenant)
        if plan.is_written and not is_for_tools:
            self._note_written_tools()
        call_bias = self._call_bias if is_for_tools else 0.0
        arguments = (ids or self._ids, messages, self._memory, params, tokens, tenant, salt, call_bias)
        new_requests = plan.requests(*arguments)
        return [self.with_adapter(request, name) for request in new_requests]

    def _plan(self, tools: list[ChatTool], options: ChatOptions, tenant: str) -> chats.ChatPlan:
        grammars = self._grammars and self._grammars.of(tenant)
        make = partial(chats.ChatPlan, tokenizer=self.tokenizer, grammars=grammars, eos_token_ids=self._end_token_ids)
        # a plan is shared by the tenant's chats with equal tools and options, unless the server runs a tool
        if any(tool.tool is not None for tool in tools):
            return make(tools, options)
        try:
            given = json.dumps([[(tool.declaration, tool.is_deferred) for tool in tools], options])
        except (TypeError, ValueError, RecursionError):  # raised for what is not JSON
            return make(tools, options)
        day = str(date.today())  # which some templates are given
        name = sha256(json.dumps([tenant, day, given]).encode()).hexdigest()
        if (plan := self._memory.entries.use(name)) is None:
            copies, copied_options = json.loads(given)  # what the caller has may change
            copied_tools = [ChatTool(declaration, None, is_deferred) for declaration, is_deferred in copies]
            plan = make(copied_tools, copied_options)
            self._memory.entries.put(tenant, name, plan, num_compiled_bytes(given))
        return plan

    def next_id(self) -> str:
        return next(self._ids)

    def default_params(self, *, is_chat: bool) -> SamplingParams:
        """Return the parameters of a prompt or conversation that brings none."""
        return replace(chats.DEFAULT_PARAMS if is_chat else SamplingParams(), **self._sampling_defaults)

    def make_either(self, prompt: Any, params: Any, tools: Any, detector: Any, options: ChatArguments) -> list[Request]:
        """Make the requests of `LLM.stream`: for a single prompt or a single conversation."""
        if chats.is_conversation(prompt):
            if detector is not None:
                raise RequestError("a chat takes no detector", got="a detector", fix="name a tool_call_parser")
            return self.make_chats([prompt], params, tools, options)
        checked_options(options)
        if isinstance(plain(prompt), int | float):
            raise RequestError("a prompt is a text or a list of token ids", got=shown(prompt), fix="give either")
        return self.make_requests([prompt], params, tools, detector, **prompt_options(options))

    def with_adapter(self, request: Request, name: str | None) -> Request:
        """Add the adapter that has this name now. Raises `RequestError` if there is none."""
        return replace(request, adapter=self._adapters.find(name)) if name else request
