"""Asynchronous calls of the server's tools: the options of a body, and reports on them in text completions."""

from collections.abc import Iterable, Mapping
from typing import Any

from jinfercept.errors import RequestError
from jinfercept.events import Called, Intercepted, Interrupted, Resumed
from jinfercept.intercept.call_markup import AsyncCalls
from jinfercept.request import Call, CompletionOutput, Interrupt
from jinfercept.server.errors import ApiError
from jinfercept.server.protocol import Extensions
from jinfercept.server.service import Service

_FIELD = "jinfercept.async_calls"

CallEvent = Called | Interrupted | Intercepted | Resumed
"""The events of a request that calls in markup, beside its tokens and its end."""


def async_calls(service: Service, body: Extensions, owner: str) -> AsyncCalls | None:
    """How a body's calls run while its requests go on, within the limits of the server; None if it does not say so.

    Args:
        owner: tenant of the requests.

    Raises:
        ApiError: 400, for a limit above the server's, marks of reasoning that are not known, and a body without server tools.
    """
    extension = body.jinfercept
    if extension is None or extension.async_calls is None:
        return None
    if not extension.wants_server_tools:
        raise ApiError.bad("asynchronous calls are those of the server's tools: give server_tools too", _FIELD)
    asked, most = extension.async_calls, service.options.max_pending_calls
    if asked.max_pending is not None and asked.max_pending > most:
        raise ApiError.bad(f"max_pending may be {most} here, not {asked.max_pending}", f"{_FIELD}.max_pending")
    said: dict[str, Any] = {name: value for name in ("calls", "on_end") if (value := getattr(asked, name)) is not None}
    if asked.reasoning is not None:
        said["reasoning"] = None if asked.reasoning == "none" else asked.reasoning
    shared = service.pending_calls.of(owner)
    try:
        delimiters = service.options.delimiters()
        return AsyncCalls(**said, max_pending=asked.max_pending or most, delimiters=delimiters, shared_limit=shared)
    except RequestError as error:
        raise ApiError.of(error, f"{_FIELD}.reasoning") from error


def event_report(event: CallEvent) -> dict[str, Any]:
    """The object `jinfercept` of a chunk for an event: `called`, `interrupts` or `trap`."""
    match event:
        case Called():
            return {"called": [{**_named(event.call), "arguments": event.call.arguments}]}
        case Intercepted():
            return {"trap": {"calls": [call.id for call in event.calls]}}
        case Interrupted() | Resumed():
            return {"interrupts": [_interrupt(interrupt) for interrupt in event.interrupts]}


def answer_report(completions: Iterable[tuple[int, CompletionOutput]]) -> Mapping[str, Any]:
    """The object `jinfercept` of an answer: the `interrupts`, the `cancelled` calls and the `traps` of all its choices.

    Args:
        completions: with the index of their choice.
    """
    report: dict[str, list[dict[str, Any]]] = {"interrupts": [], "cancelled": [], "traps": []}
    for index, completion in completions:
        choice = {"choice": index}
        report["interrupts"] += [choice | _interrupt(interrupt) for interrupt in completion.interrupts]
        report["cancelled"] += [choice | _named(call) for call in completion.cancelled]
        report["traps"] += [
            choice
            | {
                "calls": [call.id for call in pause.calls],
                "seconds": round(pause.duration_s, 4),
                "context": pause.context._asdict() if pause.context is not None else None,
            }
            for pause in completion.interceptions
        ]
    return report


def _interrupt(interrupt: Interrupt) -> dict[str, Any]:
    result = interrupt.result
    return {**_named(interrupt.call), "status": result.status, "seconds": round(result.duration_s, 4)}


def _named(call: Call) -> dict[str, Any]:
    """A call by its id and its tool; None for markup that called nothing."""
    return {"id": call.id, "name": call.name or None}
