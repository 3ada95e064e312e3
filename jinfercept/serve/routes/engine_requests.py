"""What routes share between a body and the engine: a request's hints, its sampling parameters, its checks, and its outputs."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.engine.lifecycle import check_request
from jinfercept.engine.parallel_sampling import with_prompt_experts
from jinfercept.engine.streaming import AsyncStream
from jinfercept.errors import JinferceptError
from jinfercept.events import Event, Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import Adapter, FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.serve.access.keys import isolation
from jinfercept.serve.http.access_log import TRACE
from jinfercept.serve.http.event_stream import EventStream
from jinfercept.serve.http.request_body import unless_disconnected
from jinfercept.serve.protocols.answers import ServerToolCalls, UsageCount
from jinfercept.serve.protocols.encoding import OPENAI, EncodedReply, LargeReply, StreamFormat
from jinfercept.serve.protocols.errors import ApiError, about, check_finish
from jinfercept.serve.protocols.openai.logprobs import check_experts, is_small
from jinfercept.serve.protocols.schemas import (
    MAX_SESSION_ID,
    Extensions,
    ResponseFormat,
    SamplingBody,
    SessionHints,
    check_extras,
    check_training_fields,
)
from jinfercept.serve.service import Service, service_of, tenant_of
from jinfercept.structured_outputs import StructuredOutputsParams

_FIELD = "jinfercept.async_calls"
_NAMES = frozenset(field.name for field in fields(SamplingParams))
_SAME_NAMES = (_NAMES & SamplingBody.model_fields.keys()) - {"structured_outputs"}
"""Fields with the same name and meaning in the body and in `SamplingParams`."""


class RequestHints(NamedTuple):
    """The hints of one body for its requests, by the fields of `Request`; the priority is within the range of the key."""

    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    weight: float = 1.0
    follows: str | None = None
    adapter: Adapter | None = None
    follow_up: FollowUp = FollowUp()


def read_hints(body: Extensions, request: HttpRequest) -> RequestHints:
    """The hints in a body and in the header `x-session-id`; the body's object `jinfercept` takes precedence.

    Raises:
        ApiError: 400, for a header that is too long.
    """
    extension, service = body.jinfercept or SessionHints(), service_of(request)
    header = request.headers.get("x-session-id")
    if header is not None and len(header) > MAX_SESSION_ID:
        raise ApiError.bad(f"a session id must have at most {MAX_SESSION_ID} characters", "x-session-id")
    session, model = extension.session_id or body.session_id or header or "", getattr(body, "model", None)
    if (trace := TRACE.get()) is not None:
        trace.describe(model, model or service.names[0], getattr(body, "conversation_id", None) or session)
    tenant, keys = tenant_of(request), service.keys
    return RequestHints(
        tenant=tenant,
        cache_salt=isolation(tenant, body.cache_salt),
        priority=keys.priority(tenant, (body.priority if extension.priority is None else extension.priority) or 0),
        weight=keys.rules(tenant).weight,
        adapter=service.adapter(model),
        follow_up=FollowUp(session, extension.expected_s, last=bool(extension.release)),
    )


def opened(body: Extensions, request: HttpRequest) -> tuple[Service, str, RequestHints]:
    """The service, the name of the model for the answer, and the hints of a body whose own fields are checked.

    Raises:
        ApiError: 404 for an unknown model, 400 for fields that are not supported.
    """
    service = service_of(request)
    model = service.check_model(getattr(body, "model", None))
    check_extras(body)
    return service, model, read_hints(body, request)


def with_hints(requests: Sequence[Request], hints: RequestHints) -> list[Request]:
    """The requests of one body with their hints.

    The context of each is retained for a follow-up; of several answers to one prompt, that of the first.
    """
    fields = hints._asdict()
    if hints.adapter is None:
        del fields["adapter"]
    return [replace(request, **fields | ({"follow_up": None} if request.leader else {})) for request in requests]


def async_calls(service: Service, body: Extensions, tenant: str) -> AsyncCalls | None:
    """How a body's calls run while its requests go on; None if it does not say so.

    Raises:
        ApiError: 400 for a limit above the server's, unknown marks of reasoning, and a body without server tools.
    """
    extension = body.jinfercept
    if extension is None or extension.async_calls is None:
        return None
    if not extension.wants_server_tools:
        raise ApiError.bad("async_calls need tools of the server; fix: name them in server_tools", _FIELD)
    requested, most = extension.async_calls, service.options.max_pending_calls
    if requested.max_pending is not None and requested.max_pending > most:
        raise ApiError.bad(f"max_pending must be at most {most}; got {requested.max_pending}", f"{_FIELD}.max_pending")
    options: dict[str, Any] = {
        name: value for name in ("calls", "on_end") if (value := getattr(requested, name)) is not None
    }
    if requested.reasoning is not None:
        options["reasoning"] = None if requested.reasoning == "none" else requested.reasoning
    shared = service.pending_calls[tenant]
    with about(f"{_FIELD}.reasoning"):
        delimiters = service.options.delimiters()
        return AsyncCalls(
            **options, max_pending=requested.max_pending or most, delimiters=delimiters, shared_limit=shared
        )


def sampling_params(
    body: SamplingBody, max_tokens: int | None, logprobs: int | None, service: Service, tenant: str
) -> SamplingParams:
    """The sampling parameters of a body. Structured outputs are compiled, so that mistakes in them are found here.

    Args:
        max_tokens: None: the default of the checkpoint, or up to the length of a sequence.
        logprobs: number of most likely tokens to report for each; None: no report.

    Raises:
        ApiError: 400, with the field.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError.bad("stream_options are allowed only with stream: true", "stream_options")
    given_params = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    keywords: dict[str, Any] = {"max_tokens": None, **service.llm.sampling_defaults, **given_params}
    if max_tokens is not None:
        keywords["max_tokens"] = max_tokens
    for name in ("stop", "bad_words"):
        service.check_chars(keywords.get(name), name)
    structured, llm = _structured(body), service.llm
    with about(_field_of):
        params = SamplingParams(logprobs=logprobs, **keywords)
    vocab_size = llm.model.config.vocab_size
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        if wrong := [token for token in getattr(params, name) or () if not 0 <= token < vocab_size]:
            raise ApiError.bad(f"token ids in {name} must be from 0 to {vocab_size - 1}; got {wrong[0]}", name)
    check_training_fields(body)
    if params.return_routed_experts:
        check_experts(getattr(llm.model.config, "experts", None) is not None, llm.shape.routed_experts > 0, body.stream)
    if structured is None:
        return params
    field, options = structured
    with about(field):
        outputs = StructuredOutputsParams(**options)
        if llm.grammars is not None:
            llm.grammars.of(tenant).compile(outputs)
    return replace(params, structured_outputs=outputs)


def _structured(body: SamplingBody) -> tuple[str, dict[str, Any]] | None:
    keywords = None if body.response_format is None else _of_format(body.response_format)
    if body.structured_outputs is None:
        return None if keywords is None else ("response_format", keywords)
    if keywords is not None:
        message = "only one of response_format and structured_outputs may constrain the answer"
        raise ApiError.bad(message, "structured_outputs")
    return "structured_outputs", _supported(body.structured_outputs.model_dump(exclude_none=True, by_alias=True))


def _of_format(form: ResponseFormat) -> dict[str, Any] | None:
    """The keywords for a `response_format`; None for a text. A schema is enforced wherever it stands."""
    inner = form.json_schema.schema_ if form.json_schema else None
    if None not in (inner, form.schema_) and inner != form.schema_:
        raise ApiError.bad("response_format has two schemas; fix: leave one out", "response_format.schema")
    schema = form.schema_ if inner is None else inner
    if form.type == "text":
        if schema is not None:
            raise ApiError.bad("response_format of type text has no schema: use json_schema", "response_format")
        return None
    if form.type == "json_object":
        return {"json_object": True} if schema is None else {"json": {"type": "object"} | schema}
    if schema is None:
        raise ApiError.bad("response_format needs a schema", "response_format.json_schema.schema")
    return {"json": schema}


def _supported(outputs: dict[str, Any]) -> dict[str, Any]:
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    if "structural_tag" in outputs:
        raise ApiError.bad("structural tags are not supported", "structured_outputs.structural_tag")
    return {kind: outputs[kind] for kind in kinds if kind in outputs}


def _field_of(error: JinferceptError) -> str | None:
    if error.what.startswith("greedy outputs"):
        return "n"
    first = error.what.split(maxsplit=1)[0]
    return first if first in _NAMES else None


def check_requests(service: Service, requests: Sequence[Request], param: str) -> None:
    """Raise 400 for requests that the engine refuses, for example for a prompt that leaves no room for an answer."""
    for request in requests:
        check_length(service, len(request.prompt_token_ids), param)
        with about(param):
            check_request(request, service.llm.model.config.vocab_size, service.max_model_len)


def check_length(service: Service, num_tokens: int, param: str) -> None:
    if num_tokens >= service.max_model_len:
        message = (
            f"the prompt leaves no room for an answer; got {num_tokens} tokens of at most {service.max_model_len}; fix: "
            "shorten it, or start the server with a larger --max-model-len and --kv-tokens, up to the model's limit"
        )
        raise ApiError.bad(message, param, "context_length_exceeded")


class ServedAnswer(Protocol):
    """An answer in the shapes of a protocol, made of the events of its requests, or of their outputs at once.

    Attributes:
        tool_calls: runs the calls of the server's tools that an output leaves; None: it leaves none.
        first: events of a stream before any of the engine's.
    """

    usage: UsageCount
    tool_calls: ServerToolCalls | None
    first: Sequence[Mapping[str, Any]]

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events of a stream for one of the engine's."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """One object, of the outputs of the requests in their order."""
        ...


async def answered(
    service: Service,
    http: HttpRequest,
    requests: Sequence[Request],
    answer: ServedAnswer,
    stream: bool | None,
    form: StreamFormat = OPENAI,
) -> Response:
    """The HTTP response to a body, whose requests are submitted here. They are aborted if the client disconnects.

    Raises:
        ApiError: 499 if the client disconnects, 503 if the server aborts a request, 500 if the engine fails one.
    """
    events = await service.submit(http, requests, ends_only=not stream)
    if stream:
        return EventStream(_streamed(answer, events, form), lambda: service.close(events), form)
    return await unless_disconnected(http.receive, _whole(service, requests, answer, events))


async def _streamed(answer: ServedAnswer, events: AsyncStream, form: StreamFormat) -> AsyncGenerator[bytes]:
    for shown in answer.first:
        yield form.event(shown)
    async for event in events:
        if isinstance(event, Finished):
            answer.usage.add(event.output)
            check_finish(event.output)
            if answer.tool_calls is not None:
                event = replace(event, output=await answer.tool_calls.settled(event.output))
        for shown in answer.take(event):
            yield form.event(shown)
    yield form.end


async def _whole(service: Service, requests: Sequence[Request], answer: ServedAnswer, events: AsyncStream) -> Response:
    try:
        async for event in events:
            if isinstance(event, Finished):
                check_finish(event.output)
        outputs = events.outputs
        if answer.tool_calls is not None:
            settled = await asyncio.gather(*map(answer.tool_calls.settled, outputs.values()))
            outputs = {output.request_id: output for output in settled}
    finally:
        await service.close(events)
        for output in events.outputs.values():
            answer.usage.add(output)

    def whole() -> dict[str, Any]:
        with_experts = with_prompt_experts(requests, outputs)
        return answer.whole([with_experts[request.id] for request in requests])

    return EncodedReply(whole()) if is_small(requests, outputs.values()) else LargeReply(await asyncio.to_thread(whole))
