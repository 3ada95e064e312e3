"""What all endpoints share: the model and its names, who may come, what runs, and the way of a request into the engine.

Everything here happens on the event loop, except what `prepare` is given: that runs in threads (`preparation`), since templates
and tokenizers take their time.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from starlette.requests import Request as HttpRequest

from jinfercept.chat.options import ChatOptions
from jinfercept.chat.requests import check_chars
from jinfercept.endpoints.inbox import Inbox
from jinfercept.engine.admission import check_request
from jinfercept.engine.async_streaming import AsyncStream
from jinfercept.engine.streaming import Reader
from jinfercept.errors import ConfigError, GrammarError, JinferceptError, PromptLengthError, RequestError
from jinfercept.events import Finished
from jinfercept.llm import LLM
from jinfercept.request import Call, Request, RequestOutput, Result
from jinfercept.server.errors import ApiError
from jinfercept.server.event_bridge import EventBridge
from jinfercept.server.heap import trim_heap
from jinfercept.server.keys import Keys
from jinfercept.server.options import ServerOptions
from jinfercept.server.preparation import RETRY_S, Preparation
from jinfercept.server.responses_store import ResponseStore
from jinfercept.server.server_tools import ServerTools
from jinfercept.server.tool_history import ToolHistory
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.tokenizer.tokenizer import Tokenizer

_IDLE_S = 1.0
"""Seconds without a request after which freed memory is given back."""
_CHARS_PER_TOKEN = 16
_LEAST_PROMPT_CHARS = 2**16
"""What `--max-prompt-chars` is for small models."""
BODY_BYTES = "jinfercept.body_bytes"
"""Where, in a request's scope, the size of its body stands."""


@final
class Service:
    """One model, served.

    Args:
        llm: answers; its owner closes it.
        model: as it was asked for at the start.
        options: of the server.
        tools: that the server runs; their owner closes them.

    Attributes:
        names: by which clients may ask for the model, the one that is shown first.
        created: when it was started, in seconds since 1970.
        draining: nothing new is taken any more.
        keys: who may come.
        ignored: fields that clients sent and that are not known.
        chat_template: the source that was given instead of the model's.
        responses: those that were asked to be stored.
        hidden_turns: what stood behind answers in which the server called its tools.
        inbox: where calls wait for a person; None if no tool asks one.
    """

    def __init__(self, llm: LLM, model: str | Path, options: ServerOptions, tools: ServerTools | None = None) -> None:
        self.llm, self.options = llm, options
        self.tools = tools or ServerTools()
        self.inbox: Inbox | None = self.tools.inbox
        self.root = str(model)
        self.names = options.served_model_name or (self.root,)
        self.created = int(time.time())
        self.draining = False
        self.keys = Keys(options.key_rules())
        self.chat_template = options.template()
        self.ignored: set[str] = set()
        self.hidden_turns = ToolHistory(options.response_ttl, time.monotonic)
        self.responses = ResponseStore(
            options.response_ttl,
            options.max_stored_responses,
            most_of_owner=options.max_stored_responses_per_key,
            most_background=options.max_background_responses,
        )
        self._preparation = Preparation(options.max_queue_len)
        self._closed = False
        self._mailbox: EventBridge | None = None
        self._preparing = Counter[str]()
        self._streams: set[AsyncStream] = set()
        self._busy = 0
        self._idle = asyncio.Event()
        self._trimming: asyncio.TimerHandle | None = None  # of the heap, once no request has come for a while

    def check_template(self) -> None:
        """Raise `ConfigError` if a chat template was given that does not work."""
        if self.chat_template is not None:
            try:
                self._chat_once()
            except JinferceptError as error:
                raise ConfigError(
                    "the chat template does not work", got=error, fix="correct it, or leave --chat-template out"
                ) from error

    async def warm_up(self) -> None:
        """Do once what would take the first client's time: imports, and the vocabulary of grammars."""
        await self._preparation.run("", 0, self._warm_up)

    def _warm_up(self) -> None:
        with suppress(JinferceptError):  # a model may have no template: then nobody chats with it
            self._chat_once()
        if self.llm.grammars is not None:
            self.llm.grammars.compile(StructuredOutputsParams(json_object=True))

    def _chat_once(self) -> None:
        self.llm.make_chats([({"role": "user", "content": "?"},)], None, (), self.chat_options())

    def chat_options(self, **more: Any) -> ChatOptions:
        """How conversations are rendered and read, `more` being what a request says of it."""
        return ChatOptions(
            chat_template=self.chat_template,
            tool_call_parser=self.options.tool_call_parser,
            reasoning_parser=None if self.options.reasoning_parser == "none" else self.options.reasoning_parser,
            max_prompt_chars=self.max_prompt_chars,
            special_tokens_in_text=self.options.special_tokens_in_text,
            **more,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; raises `ApiError` if it has none."""
        if self.llm.tokenizer is None:
            raise ApiError.bad("this model has no tokenizer: send token ids", code="no_tokenizer")
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.llm.shape.max_model_len

    @property
    def max_prompt_chars(self) -> int:
        """Characters that one prompt may have: what is longer is refused before it is tokenised."""
        return self.options.max_prompt_chars or max(_LEAST_PROMPT_CHARS, _CHARS_PER_TOKEN * self.max_model_len)

    def check_model(self, name: str | None) -> str:
        """The model's name; raises 404 if there is no such model."""
        if name is None or name in self.names:
            return name or self.names[0]
        known = ", ".join(self.names)
        raise ApiError(
            404, f"there is no model {name[:200]!r} here, only {known}", param="model", code="model_not_found"
        )

    def check_room(self, owner: str, number: int) -> None:
        """Raise `ApiError` if so many requests more may not wait: 503 while draining, 429 if they may later, 400 if never.

        While as many wait as may, a key may still have an equal share of them: one that fills the queue shuts out no other.

        Args:
            owner: of the key.
            number: that one body asks for.
        """
        most = self.options.max_queue_len
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": f"{RETRY_S}"})
        if number > most:
            message = f"a body asks for at most {most} answers; got {number}; fix: a smaller n, or fewer prompts"
            raise ApiError.bad(message, "n")
        waiting = self.llm.engine.num_waiting + self._preparing.total()
        if waiting + number > most and self._num_waiting_of(owner) + number > most // self._num_waiting_keys(owner):
            raise ApiError(
                429,
                f"{waiting} requests are waiting, {most} may; got {number} more",
                code="queue_full",
                headers={"Retry-After": f"{RETRY_S}"},
            )

    def _num_waiting_of(self, owner: str) -> int:
        return self.llm.engine.num_waiting_by_tenant((owner,))[owner] + self._preparing[owner]

    def _num_waiting_keys(self, owner: str) -> int:
        """Keys with requests that wait, this one among them."""
        waiting = Counter(self.llm.engine.num_waiting_by_tenant(self.keys.owners)) + self._preparing
        return len({owner, *(key for key, number in waiting.items() if number)})

    def check_chars(self, said: Any, param: str) -> None:
        """Raise 400 for more text than one prompt may have: tokenising it would take long.

        Args:
            said: texts, and lists and dicts of them.
            param: the field that they come from.
        """
        try:
            check_chars(said, self.max_prompt_chars)
        except PromptLengthError as error:
            raise ApiError.of(error, param) from error

    async def prepare[T](self, request: HttpRequest, work: Callable[[], T], number: int = 0, num_bytes: int = 0) -> T:
        """Do what takes long on the way to the engine; it is dropped if the client goes before it begins.

        Args:
            request: says whose it is and how large.
            number: requests that it makes; if any, there has to be room for them.
            num_bytes: that the work reads besides the request's body.

        Raises:
            ApiError: what the work raises, a `JinferceptError` as 400; 429, 503 and 499 if it is not done.
        """
        key, size = request.scope["jinfercept.key"], request.scope.get(BODY_BYTES, 0) + num_bytes
        if number:
            self.check_room(key, number)
        self._preparing[key] += number
        try:
            return await unless_gone(request, self._preparation.run(key, size, work))
        except JinferceptError as error:
            raise ApiError.of(error) from error
        finally:
            self._preparing[key] -= number
            self._preparing += Counter()  # forgets keys that have nothing

    def submit(
        self, requests: Sequence[Request], readers: Mapping[str, Reader] | None = None, *, ends_only: bool = False
    ) -> AsyncStream:
        """Give requests that were prepared to the engine.

        Raises:
            ApiError: 400 for what the engine refuses, none of them is started then; 503 when the drain is over.
        """
        if self._closed:
            raise ApiError(503, "the server gave the request up", code="aborted")
        self._mailbox = self._mailbox or EventBridge()
        try:
            stream = AsyncStream(self.llm.thread, requests, readers, ends_only=ends_only, post=self._mailbox.post)
        except RequestError as error:
            raise ApiError.of(error) from error
        self._streams.add(stream)
        return stream

    async def close(self, stream: AsyncStream) -> None:
        """Give up what is not finished of a stream; its pages are free within a step."""
        self._streams.discard(stream)
        await stream.aclose()

    def note_calls(self, request: Request, calls: Sequence[Call], results: Sequence[Result]) -> None:
        """Count calls that were run when their request had ended."""
        self.llm.thread.ask(lambda: self.llm.meter.interceptions.ran(request, calls, results))

    def entered(self) -> None:
        """A request to the server began."""
        self._busy += 1
        self._idle.clear()
        if self._trimming is not None:
            self._trimming.cancel()

    def left(self) -> None:
        """It was answered, or gave up."""
        self._busy -= 1
        if not self._busy:
            self._idle.set()
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(_IDLE_S, lambda: loop.run_in_executor(None, trim_heap))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when everything has been answered. What takes longer than `timeout_s` is given up: 503 for
        what is prepared, an error at the end of a stream."""
        self.draining = True
        if self._busy:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        self._closed = True
        self._preparation.close()
        for stream in list(self._streams):
            stream.abort()

    def shut(self) -> None:
        """End the threads."""
        self._preparation.close()


def service_of(request: HttpRequest) -> Service:
    """The service that a request was sent to."""
    return request.app.state.service


async def finished(
    service: Service, request: HttpRequest, stream: AsyncStream, note: Callable[[RequestOutput], object]
) -> Mapping[str, RequestOutput]:
    """The outputs of a stream, once all are there, by request id. A client that goes away gives them up.

    Args:
        note: told of every output, also of those that are no answers.

    Raises:
        ApiError: 499 for nobody to read, 503 if the server gave them up, 500 if the engine did.
    """

    async def all_of_it() -> Mapping[str, RequestOutput]:
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    check_finish(event.output)
            return stream.outputs
        finally:
            await service.close(stream)
            for output in stream.outputs.values():
                note(output)

    return await unless_gone(request, all_of_it())


async def unless_gone[T](request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns; it is cancelled, and 499 raised, if the client goes away."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has gone")
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def check_requests(service: Service, requests: Sequence[Request], param: str) -> None:
    """Raise 400 for what the engine would refuse, a prompt that leaves no room for an answer for example.

    Args:
        param: the field that the prompts came from.
    """
    for request in requests:
        check_length(service, len(request.prompt_token_ids), param)
        try:
            check_request(request, service.llm.model.config.vocab_size, service.max_model_len)
        except RequestError as error:
            raise ApiError.of(error, param) from error


def check_length(service: Service, num_tokens: int, param: str) -> None:
    """Raise 400 for a prompt of so many tokens if it leaves no room for an answer."""
    if num_tokens >= service.max_model_len:
        message = f"the prompt has {num_tokens} tokens; with its answer it may have {service.max_model_len}"
        raise ApiError.bad(message, param, "context_length_exceeded")


def check_finish(output: RequestOutput) -> None:
    """Raise `ApiError` if an output is no answer."""
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise ApiError(503, "the server gave the request up", code="aborted")
        if completion.finish_reason == "error" and f"{completion.stop_reason}".startswith(GrammarError.__name__):
            raise ApiError.bad(f"{completion.stop_reason}", code="grammar_error")
        if completion.finish_reason == "error":
            raise ApiError(500, f"the engine failed: {completion.stop_reason}", code="engine_error")


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
