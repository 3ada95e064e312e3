"""The output of a request as a message of Anthropic's protocol: one object, or a stream of typed events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from pydantic_core import from_json

from jinfercept.events import Arguments, CallStarted, Content, Event, Finished, Reasoning, Token
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.request import Request
from jinfercept.serve.protocols.answers import AnswerState, ServerToolCalls, UsageCount, call_reports, pieces_of
from jinfercept.serve.protocols.anthropic.dialect import anthropic_error
from jinfercept.serve.protocols.anthropic.schemas import MessagesBody
from jinfercept.serve.protocols.encoding import StreamFormat, encode, encode_event
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.values import json_object

_PING = {"type": "ping"}
_SIGNATURE = "unsigned"
"""Signature of all reasoning; clients need one, and send it back."""


def stream_format(request_id: str) -> StreamFormat:
    """How a stream of Anthropic's protocol is kept alive, and how it fails."""

    def failed(error: ApiError) -> bytes:
        return _encoded(anthropic_error(error.status_code, error.detail, error.param, request_id))

    return StreamFormat(_encoded(_PING), failed, _encoded, b"")


@final
class MessageAnswer:
    """The message for one body. `details` are fields of the log line; filled in as they become known."""

    def __init__(
        self,
        name: str,
        model: str,
        body: MessagesBody,
        requests: Sequence[Request],
        tool_calls: ServerToolCalls,
        details: dict[str, Any],
    ) -> None:
        self.tool_calls: ServerToolCalls | None = tool_calls
        self._wants_server_calls = bool(body.jinfercept and body.jinfercept.wants_server_tools)
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        details["id"] = name
        self.usage = UsageCount(requests, details)
        begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._counted()}
        start = {"type": "message_start", "message": self._head | begun}
        self.first: Sequence[Mapping[str, Any]] = (start, _PING)
        self._state = AnswerState(tool_calls.client_tools)
        self._number = 0
        self._open = ""  # type of the open block; "" if none is open
        self._blank = ""  # white space before the first visible text of a block
        self._is_object: bool | None = None  # the arguments of the open call, once they begin

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        message: dict[str, Any] = {**self._head, "content": []}
        for event in (*pieces_of(output.outputs[0]), Finished(output.request_id, output, "")):
            for shown in self.take(event):
                _fold(message, shown)
        return message

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Token):
            self.usage.count(1)
            return
        match self._state.take(event):
            case Reasoning(text):
                yield from self._say("thinking", text)
            case Content(text):
                yield from self._say("text", text)
            case CallStarted(name=name, id=call_id):
                self._is_object = None
                yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(text=text) if self._open == "tool_use":
                if self._is_object is None and (written := text.lstrip()):
                    self._is_object = written.startswith("{")
                    yield self._delta("input_json_delta", partial_json=text if self._is_object else "{}")
                elif self._is_object:
                    yield self._delta("input_json_delta", partial_json=text)
            case Finished() as event:
                yield from self._end()
                [completion] = event.output.outputs
                ended = {"type": "message_delta", "delta": _stop(completion), "usage": self._counted()}
                calls = {"jinfercept": {"server_calls": call_reports(completion)}} if self._wants_server_calls else {}
                yield ended | calls
                yield {"type": "message_stop"}
            case _:
                pass

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Add to a block of text or reasoning. White space alone makes no block."""
        if self._open != kind:
            text, self._blank = self._blank + text if kind == "text" else text.lstrip(), ""
            if not text.strip():
                self._blank = text
                return
            yield from self._begin({"type": "text", "text": ""} if kind == "text" else _EMPTY_THINKING)
        if text:
            yield self._delta(f"{kind}_delta", **{kind: text})

    def _begin(self, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._open, self._blank = block["type"], ""
        yield {"type": "content_block_start", "index": self._number, "content_block": block}

    def _end(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        yield {"type": "content_block_stop", "index": self._number}
        self._number, self._open = self._number + 1, ""

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._number, "delta": {"type": kind, **fields}}

    def _counted(self) -> dict[str, int]:
        """The current `usage`. All contexts are retained, and none costs more for it."""
        usage = self.usage.body()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


_EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}


def _fold(message: dict[str, Any], event: Mapping[str, Any]) -> None:
    """Add an event of a stream to the whole message, as Anthropic's client does."""
    match event:
        case {"type": "content_block_start", "content_block": block}:
            message["content"].append({**block})
        case {"delta": {"type": "input_json_delta", "partial_json": text}}:
            message["content"][-1]["input"] = _object(text)  # which come in one piece
        case {"type": "content_block_delta", "delta": delta}:
            (_, (field, text)) = delta.items()
            message["content"][-1][field] = message["content"][-1][field] + text
        case {"type": "message_delta"}:
            message |= {
                **event["delta"],
                **{name: value for name, value in event.items() if name not in ("type", "delta")},
            }
        case _:
            pass


def _encoded(event: Mapping[str, Any]) -> bytes:
    return encode_event(event, event["type"])


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, as `json_object` reads them. Of those that were cut off, the part that is complete, as
    Anthropic's client reads it."""
    try:
        read = from_json(arguments, allow_partial=True, allow_inf_nan=False)
        encode(read)
        return read
    except ValueError:
        return json_object(arguments)


def _stop(completion: CompletionOutput) -> dict[str, Any]:
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": reasons.get(completion.finish_reason, "end_turn"), "stop_sequence": None}
