"""The state that all routes share: the model and its names, the keys, the requests in progress, submission to the engine.

All methods run on the event loop. Functions passed to `prepare` run in threads (`FairThreadPool`), since templates and
tokenizers are slow.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest

from jinfercept.calls import Call, Result
from jinfercept.chat.options import ChatOptions
from jinfercept.chat.requests import check_chars
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.engine.streaming import AsyncStream
from jinfercept.errors import ConfigError, JinferceptError
from jinfercept.hooks import SharedLimit
from jinfercept.llm import LLM
from jinfercept.request import Adapter, Request
from jinfercept.serve.access.key_limits import RETRY_S, FairThreadPool, OpenSockets, ServedState
from jinfercept.serve.http.access_log import DETAILS, PLACE, TRACE
from jinfercept.serve.http.request_body import unless_disconnected
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.protocols.errors import ApiError, aborted, about, overloaded, shutting_down
from jinfercept.serve.server_tools import ServerTools, ToolHistory
from jinfercept.serve.state.database import StateDatabase
from jinfercept.serve.state.store import StateStore
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.tools.inbox import Inbox

if TYPE_CHECKING:
    from jinfercept.serve.observe.traces import Tracing

log = logging.getLogger("jinfercept.serve")

_ENDING_S, _MOST_ENDING_S = 1.0, 5.0
"""Seconds for a step of the shutdown, if the drain took all of its time, and if it did not."""
_CHARS_PER_TOKEN = 16
_MIN_PROMPT_CHARS = 2**16
"""Default of `--max-prompt-chars` for small models."""
KEY = "jinfercept.key"
"""Key of a request's scope: its tenant."""
BODY_BYTES = "jinfercept.body_bytes"
"""Key of a request's scope: the size of its body in bytes."""


@final
class Service(ServedState):
    """One served model.

    Args:
        llm: generates; its caller closes it.
        model: path or name of the model on the command line.
        database: of the stored state, closed with the service; None: the one of the options.

    Attributes:
        expert_bytes: of a token's experts in all layers, at most; 0: the engine does not return them.
        names: of the model in requests; answers have the first one by default.
        created: start of the server, in seconds since 1970.
        inbox: where calls wait for a person; None if there is no person tool.
        refused: answers of status 429, by the code of their error.
        waking: timer that wakes the engine after the `timeout_s` of a sleep; None: the engine sleeps until `/resume`.
    """

    def __init__(
        self,
        llm: LLM,
        model: str | Path,
        options: ServerOptions,
        tools: ServerTools | None = None,
        database: StateDatabase | None = None,
    ) -> None:
        super().__init__(options)
        self.llm = llm
        self.tools = tools or ServerTools()
        self.inbox: Inbox | None = self.tools.inbox
        self.max_model_len = llm.shape.max_model_len
        self.expert_bytes = 2 * llm.shape.routed_experts * llm.model.config.num_layers
        self.max_prompt_chars = options.max_prompt_chars or max(
            _MIN_PROMPT_CHARS, _CHARS_PER_TOKEN * self.max_model_len
        )
        self.root = str(model)
        self.names = options.served_model_name or (self.root,)
        llm.engine.snapshot()  # begins to count
        options.check_adapters(self.names, llm.engine.adapters.names, llm.engine.adapters.num_slots)
        self.created = int(time.time())
        self.chat_template = options.template()
        self.tool_history = ToolHistory(options.response_ttl, time.monotonic)
        self.database = database or options.open_state()
        self.state = StateStore(self.database, options.max_background_responses)
        self.pending_calls = defaultdict[str, SharedLimit](lambda: SharedLimit(options.max_pending_calls_per_key))
        self.tracing: Tracing | None = None
        if (endpoint := options.traces()) is not None:
            from jinfercept.serve.observe.traces import open_tracing

            self.trace_to(open_tracing(endpoint))
        self.refused = Counter[str]()
        self.waking: asyncio.TimerHandle | None = None
        self._threads = FairThreadPool(options.max_queue_len)
        self.sockets = OpenSockets(options)
        self._closed = False
        self._event_bridge: EventBridge | None = None
        self._preparing = Counter[str]()
        self._streams: dict[AsyncStream, tuple[str, int]] = {}  # with their tenants and numbers of requests

    def trace_to(self, tracing: "Tracing") -> None:
        """Trace requests, and the calls of the server's tools."""
        self.tracing, self.tools.traced = tracing, tracing.tool

    def check_template(self) -> None:
        """Raise `ConfigError` if the given chat template fails."""
        if self.chat_template is not None:
            try:
                self._chat_once()
            except JinferceptError as error:
                raise ConfigError(
                    "the chat template does not work", got=error, fix="correct it, or leave --chat-template out"
                ) from error

    async def warm_up(self) -> None:
        """Load what the first request would wait for, lazy imports and the vocabulary of grammars."""
        await self._threads.run("", 0, self._warm_up)

    def _warm_up(self) -> None:
        with suppress(JinferceptError):  # a model without a template has no chats
            self._chat_once()
        if self.llm.grammars is not None:
            self.llm.grammars.compile(StructuredOutputsParams(json_object=True))

    def _chat_once(self) -> None:
        self.llm.make_chats([({"role": "user", "content": "?"},)], None, (), self.chat_options())

    def chat_options(self, **more: Any) -> ChatOptions:
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
        """The model's tokenizer. Raises `ApiError` if it has none."""
        if self.llm.tokenizer is None:
            raise ApiError.bad("the model has no tokenizer; fix: send token ids", code="no_tokenizer")
        return self.llm.tokenizer

    def check_model(self, name: str | None) -> str:
        """The name of the model or of its adapter for an answer; raises 404 for an unknown one."""
        if name is None or name in self.names or self.adapter(name) is not None:
            return name or self.names[0]
        names = ", ".join((*self.names, *self.llm.loras))
        raise ApiError(
            404, f"no model is named {name[:200]!r}; available: {names}", param="model", code="model_not_found"
        )

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a request has by the model that it names; None: none by that."""
        return None if name is None else self.llm.engine.adapters.get(name)

    def check_room(self, tenant: str, number: int) -> None:
        """Raise `ApiError` for requests that may not come in: 503 while draining, 429 for now, 400 for too many at once.

        In a full queue every key may still have an equal share, so that one key cannot shut out others.
        """
        most = self.options.max_queue_len
        if self.draining:
            raise shutting_down()
        if number > most:
            message = f"a request may ask for at most {most} answers; got {number}; fix: a smaller n, or fewer prompts"
            raise ApiError.bad(message, "n")
        waiting = self.llm.engine.num_waiting + self._preparing.total()
        if waiting + number > most:
            by_key = Counter(self.llm.engine.num_waiting_by_tenant({tenant, *self.keys.tenants})) + self._preparing
            if by_key[tenant] + number > most // len({tenant, *by_key}):
                raise ApiError(
                    429,
                    f"the queue is full: {waiting} requests wait and at most {most} may; got {number} more; fix: retry later",
                    code="queue_full",
                    headers={"Retry-After": f"{RETRY_S}"},
                )
        self.limits.check(tenant, number, self._preparing[tenant])

    def check_chars(self, texts: Any, param: str) -> None:
        """Raise 400 for more text than one prompt may have. `texts` is a text, or lists and dicts of texts."""
        with about(param):
            check_chars(texts, self.max_prompt_chars)

    async def prepare[T](self, request: HttpRequest, work: Callable[[], T], number: int = 0, num_bytes: int = 0) -> T:
        """Run a slow function in a thread; it is dropped if the client disconnects before it begins.

        Args:
            number: requests that it makes, for which the queue has to have room.
            num_bytes: size of its input besides the body.

        Raises:
            ApiError: raised by the function, a `JinferceptError` as 400; 429, 503 or 499 if it is not run.
        """
        key, size = tenant_of(request), request.scope.get(BODY_BYTES, 0) + num_bytes
        if number:
            self.check_room(key, number)
        self._preparing[key] += number
        try:
            with about():
                return await unless_disconnected(request.receive, self._threads.run(key, size, work))
        finally:
            self._preparing[key] -= number
            self._preparing += Counter()  # drops keys with no requests

    async def submit(self, http: HttpRequest, requests: Sequence[Request], *, ends_only: bool = False) -> AsyncStream:
        """Submit prepared requests to the engine, all or none. The details of `http` get their place at the door.

        Args:
            ends_only: whether the stream has only the last event of each request.

        Raises:
            ApiError: 400 if the engine refuses a request, 429 if it takes no new conversation, 503 after the drain.
        """
        if self._closed:
            raise aborted()
        tenant = requests[0].tenant
        self._event_bridge = self._event_bridge or EventBridge()
        trace = TRACE.get()
        if trace is not None:
            trace.attach(requests)
        post = self._event_bridge.post
        with about():
            stream = self.llm.engine.submit(requests, ends_only=ends_only, post=post)
        if trace is not None:
            trace.streams.append(stream)
        self._streams[stream] = tenant, len(requests)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests if request.leader is None)
        self.limits.began(tenant, len(requests), num_tokens)
        if place := await asyncio.wrap_future(self.llm.engine.place_at_door(requests)):
            if self.llm.engine.overload == "refuse":
                await self.close(stream)
                raise overloaded()
            http.scope[DETAILS][PLACE] = place
        return stream

    async def close(self, stream: AsyncStream) -> None:
        """Abort the unfinished requests of a stream; their pages are free within a step."""
        counted = self._streams.pop(stream, None)
        try:
            await stream.aclose()
        finally:
            if counted is not None:
                outputs = (completion for output in stream.outputs.values() for completion in output.outputs)
                self.limits.ended(*counted, sum(completion.num_generated for completion in outputs))

    def note_calls(self, request: Request, calls: Sequence[Call], results: Sequence[Result]) -> None:
        """Count calls that were run after the end of their request."""
        self.llm.engine.ask(lambda stats: stats.interceptions.ran(request, calls, results))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and return when those in progress have ended.

        After `timeout_s` they are aborted: 503 for those in preparation, an error event at the end of streams.
        """
        self.draining = True
        self.tools.ends_s = time.monotonic() + timeout_s + _ENDING_S
        self.sockets.end()
        await self.until_idle(timeout_s)
        self._closed = True
        self._threads.close()
        for stream in list(self._streams):
            stream.abort()
        await self.until_idle(_ENDING_S)  # uvicorn closes WebSockets, so their last events are sent first

    def close_threads(self) -> None:
        self._threads.close()
        if self.tracing is not None:
            self.tracing.close(self._rest_s())

    async def close_state(self) -> None:
        """Store the ends of responses, and close the database."""
        await self.state.close(self._rest_s())
        self.database.close()

    def _rest_s(self) -> float:
        ends_s = self.tools.ends_s
        return _MOST_ENDING_S if ends_s is None else min(_MOST_ENDING_S, max(_ENDING_S, ends_s - time.monotonic()))


def service_of(request: HTTPConnection) -> Service:
    return request.app.state.service


def tenant_of(request: HttpRequest) -> str:
    """The tenant of a request whose key is checked (`GuardedRoute`): the digest of its key; "" without keys."""
    return request.scope[KEY]


Delivery = tuple[Callable[[Any], None], Any]


@final
class EventBridge:
    """A queue of callbacks for the event loop that runs when it is made; `post` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Delivery] = deque()
        self._woken = False

    def post(self, put: Callable[[Any], None], event: Any) -> None:
        """Call `put(event)` on the event loop, in order. Raises `RuntimeError` if the loop is closed."""
        self._pending.append((put, event))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the queue is emptied: an event posted from now on wakes the loop again
        while self._pending:
            put, event = self._pending.popleft()
            put(event)
