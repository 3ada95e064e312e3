"""Recorded traffic as sessions to plan with: traces of `simulate`, OpenTelemetry's spans of `gen_ai`, the server's JSON log.

Each is a file of JSON lines; the first line shows which. Spans are OTLP's JSON (`resourceSpans`) or one span a line, with
attributes as a list or an object. What becomes a session: spans of one `gen_ai.conversation.id`, in the order of their starts.
The log knows no conversations: a request whose cached tokens end where an earlier request of the same API key ended follows it.
A request whose prompt is shorter than the context before it begins a session of its own.
"""

import json
import math
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sim.workload import MOST_TOKENS, Script, Segment, load_trace

MOST_REQUESTS = 2_000_000
_PAGE_SLACK = 64
"""Tokens by which cached tokens may end before a context: the part of its last page."""
_FIX = "give a trace of simulate, spans with gen_ai.usage.input_tokens, or the log of serve --log-format json"


class RecordedTraffic(NamedTuple):
    """Sessions that were recorded.

    Attributes:
        rate: sessions per second; None where no times were recorded.
    """

    scripts: Sequence[Script]
    rate: float | None


class _Recorded(NamedTuple):
    """A request: its times, its tokens, and what it belongs to."""

    began_s: float
    ended_s: float
    prompt_tokens: int
    new_tokens: int
    tenant: str
    conversation: str
    cached_tokens: int


def read_traffic(path: str | Path) -> RecordedTraffic:
    """The sessions in a file. Raises `ConfigError` if there are none, or if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "")
            if _is_trace(first):
                return RecordedTraffic(load_trace(path), None)
            file.seek(0)
            requests = list(_requests(file, str(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("recorded traffic cannot be read", got=f"{path} ({error})", fix=_FIX) from None
    if not requests:
        raise ConfigError("recorded traffic has no requests with tokens", got=path, fix=_FIX)
    sessions = list(_sessions(requests))
    seconds = max(request.ended_s for request in requests) - min(request.began_s for request in requests)
    return RecordedTraffic([_script(session) for session in sessions], len(sessions) / seconds if seconds > 0 else None)


def without_system_prompt(script: Script, shared_tokens: int) -> Script:
    """A recorded session without the system prompt, which is added to every session."""
    return script._replace(prompt=max(1, script.prompt - shared_tokens))


def _is_trace(line: str) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "segments" in value


def _requests(lines: Iterable[str], path: str) -> Iterator[_Recorded]:
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not JSON", got=error, fix=_FIX) from None
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object", got=reprlib.repr(value), fix=_FIX)
        for request in _of_line(value):
            count += 1
            if count > MOST_REQUESTS:
                raise ConfigError("recorded traffic is too long", got=path, fix=f"at most {MOST_REQUESTS:,} requests")
            yield request


def _of_line(value: Mapping[str, Any]) -> Iterator[_Recorded]:
    if "resourceSpans" in value:
        for resource in _list(value["resourceSpans"]):
            for scope in _list(resource.get("scopeSpans")):
                yield from (request for span in _list(scope.get("spans")) if (request := _of_span(span)))
    elif "attributes" in value:
        if request := _of_span(value):
            yield request
    elif request := _of_log(value):
        yield request


def _of_span(span: Mapping[str, Any]) -> _Recorded | None:
    names = span.get("attributes")
    if not isinstance(names, dict):
        names = {item.get("key"): item.get("value") for item in _list(names)}
        for name, value in names.items():  # in OTLP's form: `{"intValue": "12"}`
            names[name] = next(iter(value.values()), None) if isinstance(value, dict) else value
    prompt, new = _count(names.get("gen_ai.usage.input_tokens")), _count(names.get("gen_ai.usage.output_tokens"))
    began = _seconds(span.get("startTimeUnixNano", span.get("start_time")))
    ended = _seconds(span.get("endTimeUnixNano", span.get("end_time")))
    if not prompt or began is None or ended is None:
        return None
    conversation = names.get("gen_ai.conversation.id")
    name = conversation if isinstance(conversation, str) else ""
    return _Recorded(began, max(began, ended), prompt, max(1, new), "", name, 0)


def _of_log(line: Mapping[str, Any]) -> _Recorded | None:
    prompt, new = _count(line.get("prompt_tokens")), _count(line.get("completion_tokens"))
    ended, seconds = _seconds(line.get("time")), line.get("seconds")
    if not prompt or ended is None or not isinstance(seconds, int | float):
        return None
    tenant, session = str(line.get("key", "")), line.get("session")
    name = session if isinstance(session, str) else ""
    return _Recorded(ended - seconds, ended, prompt, max(1, new), tenant, name, _count(line.get("cached_tokens")))


def _sessions(requests: Iterable[_Recorded]) -> Iterator[list[_Recorded]]:
    """Requests by session: by its name, or for those without one by where their cached tokens end."""
    named = defaultdict[str, list[_Recorded]](list)
    open_sessions = defaultdict[str, dict[int, list[_Recorded]]](dict)
    for request in sorted(requests, key=lambda request: request.began_s):
        if request.conversation:
            named[f"{request.tenant}\0{request.conversation}"].append(request)
            continue
        contexts = open_sessions[request.tenant]
        ends = (end for end in range(request.cached_tokens, request.cached_tokens + _PAGE_SLACK) if end in contexts)
        end = next(ends, None) if request.cached_tokens else None
        session = contexts.pop(end) if end is not None else []
        session.append(request)
        context = request.prompt_tokens + request.new_tokens
        if context in contexts:
            yield contexts.pop(context)
        contexts[context] = session
    for contexts in open_sessions.values():
        yield from contexts.values()
    for session in named.values():
        start = 0
        for place in range(1, len(session)):
            before = session[place - 1]
            if session[place].prompt_tokens < before.prompt_tokens + before.new_tokens:
                yield session[start:place]
                start = place
        yield session[start:]


def _script(session: Sequence[_Recorded]) -> Script:
    segments = list[Segment]()
    for request, after in pairwise(session):
        returned = max(0, after.prompt_tokens - request.prompt_tokens - request.new_tokens)
        segments.append(Segment(request.new_tokens, max(0.0, after.began_s - request.ended_s), returned))
    return Script("recorded", session[0].prompt_tokens, (*segments, Segment(session[-1].new_tokens, None, 0)))


def _list(value: Any) -> list[Any]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: Any) -> int:
    """Tokens; 0 for what is no number of them. OTLP writes large integers as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else 0


def _seconds(value: Any) -> float | None:
    """Seconds since 1970 of nanoseconds, as a number or a text of digits, or of an ISO time; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 25:
        return int(value) / 1e9
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value / 1e9
    return None
