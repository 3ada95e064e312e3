"""`RequestMaker`: prompts and conversations for one model become requests, which the engine has not seen."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache, partial
from hashlib import sha256
from itertools import count
from typing import Any, final

from jinfercept.calls import Tool
from jinfercept.chat import chats, requests
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.grammar.limits import num_compiled_bytes
from jinfercept.chat.memory import ChatMemory, GivenTokens
from jinfercept.chat.options import ChatArguments, ChatOptions
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.written_tools import log_written_tools
from jinfercept.config import AdapterChoice
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.parallel_sampling import forks
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams


@final
class RequestMaker:
    """Makes requests, from any thread.

    Args:
        tokenizer: of the model; None without one.
        grammars: compiles structured outputs; None without a tokenizer.
        end_token_ids: the tokens that end a turn.
        max_model_len: limit of the tokens of a chat that a follow-up may continue.
        sampling_defaults: fields of the `SamplingParams` of prompts that bring none.
        check_process: raises in a forked child, where a tokenizer may hang.
        adapters: that requests may name.
        adapter_choice: which adapter chats with tools have that name none, and the bias of their calls; None: no adapter.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
        end_token_ids: Sequence[int],
        max_model_len: int,
        sampling_defaults: Mapping[str, Any],
        check_process: Callable[[], None],
        adapters: AdapterTable,
        adapter_choice: AdapterChoice | None = None,
    ) -> None:
        self.tokenizer, self._grammars, self._end_token_ids = tokenizer, grammars, end_token_ids
        self._max_model_len, self._sampling_defaults = max_model_len, sampling_defaults
        self._check_process = check_process
        self._adapters = adapters
        self._tool_lora = adapter_choice.of_tools if adapter_choice else None
        self._call_bias = adapter_choice.call_bias if adapter_choice else 0.0
        self._ids = map("request-{}".format, count())
        self._note_written_tools = cache(log_written_tools)
        self.forget_chats()

    def forget_chats(self) -> None:
        """Forget earlier chats, their plans and their tokens: the pages of their contexts are gone."""
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
        """What `LLM.generate` serves; several of a prompt with `n` outputs.

        Args:
            ids: names for them, one for each prompt; made up by default.
            tenant: whose grammars they are.
            lora: names of adapters, one for all or one for each prompt.
        """
        self._check_process()
        params = self.default_params(is_chat=False) if params is None else params
        grammars = self._grammars.of(tenant) if self._grammars and tenant else self._grammars
        arguments = (ids or self._ids, prompts, params, tools, detector, self.tokenizer, grammars, async_calls)
        new_requests = requests.make_requests(*arguments)
        if lora is not None:
            names = requests.one_each(lora, str, len(new_requests), "lora")
            new_requests = [self.with_adapter(request, name) for request, name in zip(new_requests, names, strict=True)]
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
        """What `LLM.chat` serves; several of a conversation with `n` outputs.

        Args:
            salt: of their pages.
            tokens: of the leading messages of a single conversation; None: earlier chats of the same messages are looked for.
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
        """The plan of chats with these tools and options: that of the tenant's earlier ones, unless the server runs a tool."""
        grammars = self._grammars and self._grammars.of(tenant)
        make = partial(chats.ChatPlan, tokenizer=self.tokenizer, grammars=grammars, eos_token_ids=self._end_token_ids)
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
        """A name for a request."""
        return next(self._ids)

    def default_params(self, *, is_chat: bool) -> SamplingParams:
        """The parameters of a prompt or a conversation that brings none."""
        return replace(chats.DEFAULT_PARAMS if is_chat else SamplingParams(), **self._sampling_defaults)

    def make_either(self, prompt: Any, params: Any, tools: Any, detector: Any, options: ChatArguments) -> list[Request]:
        """What `LLM.stream` serves: a single prompt or a single conversation."""
        if chats.is_single_chat(prompt, detector, options):
            return self.make_chats([prompt], params, tools, options)
        own = {"async_calls": options.get("async_calls"), "lora": options.get("lora")}
        return self.make_requests([prompt], params, tools, detector, **own)

    def with_adapter(self, request: Request, name: str | None) -> Request:
        """The request with the adapter that has this name now. Raises `RequestError` if there is none."""
        return replace(request, adapter=self._adapters.find(name)) if name else request
