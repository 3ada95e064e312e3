"""Builds a response, and its typed events, from the engine's events of its request."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

from jinfercept import events
from jinfercept.calls import Call, Result
from jinfercept.chat.futures import future_of
from jinfercept.outputs import CompletionOutput, Interception, RequestOutput
from jinfercept.serve.protocols.answers import ServerToolCalls, UsageCount, call_reports
from jinfercept.serve.protocols.errors import ApiError, check_finish
from jinfercept.serve.protocols.openai.response_items import Item, new_item, server_call
from jinfercept.serve.protocols.openai.response_tools import CLIENT_CALLS, ClientTools, client_call_value

Logprobs = Callable[[Sequence[events.Token]], list[dict[str, Any]]]
"""Reports log probabilities of tokens."""

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the part of a text item, by the item's type; names of events contain it."""
_SHOWN_ARGUMENTS = ("function_call", "mcp_call")
"""Types of the items whose arguments are shown as the model writes them."""
_FAILED = ("error", "timeout", "unknown_tool")


@final
class ResponseWriter:
    """The state of one response while it is generated.

    Events have to be encoded as they are yielded: they refer to the response itself, which changes.

    Args:
        response: without output, `queued` or `in_progress`; the writer changes it.
        usage: counts the request's tokens.
        tool_calls: runs the calls of the server's tools; their items are complete once they have results.
        logprobs: reports log probabilities; None: they are not reported.
        warms_up: whether the response has no output: only its prompt is computed, and the token behind it dropped.

    Attributes:
        error: of a failed response; None before.
    """

    def __init__(
        self,
        response: dict[str, Any],
        usage: UsageCount,
        tools: ClientTools,
        tool_calls: ServerToolCalls,
        logprobs: Logprobs | None,
        warms_up: bool = False,
    ) -> None:
        self.response, self._warms_up = response, warms_up
        self._tools, self._tool_calls = tools, tool_calls
        self._round = 0
        self._running: dict[str, int] = {}  # places of the server's calls without results, by id
        self._calls: tuple[Call, ...] = ()
        self._futures: dict[str, str] = {}  # ids of the server's calls that go on, by name of the future
        self.error: ApiError | None = None
        self._usage, self._logprobs = usage, logprobs
        self._number = 0
        self._open: Item | None = None  # the last item, until it is complete
        self._pieces: list[str] = []  # of the open item's text
        self._unread: list[events.Token] = []  # whose text is not shown yet
        self._blank = ""  # white space before the first visible text
        self._cancelled = False

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events of a response."""
        yield self._event("response.created", response=self.response)
        yield self._event(f"response.{self.response['status']}", response=self.response)

    def take(self, event: events.Event) -> Iterator[dict[str, Any]]:
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            yield self._event("response.in_progress", response=self.response)
        if self._warms_up and not isinstance(event, events.Finished):
            return
        match event:
            case events.Token():
                self._usage.count(1)
                self._unread.append(event)
            case events.Reasoning():
                yield from self._say("reasoning", event.text)
            case events.Content() if self._is("message") or not event.text.isspace():
                yield from self._say("message", event.text)
            case events.Content():
                self._blank += event.text
            case events.CallStarted():
                yield from self._call(event)
            case events.Arguments():
                self._pieces.append(event.text)
                if (
                    self._open is not None and self._open["type"] in _SHOWN_ARGUMENTS
                ):  # others: JSON around what they show
                    yield self._item_event(f"response.{self._open['type']}_arguments.delta", delta=event.text)
            case events.CallEnded() if self._is("mcp_call"):
                assert self._open is not None
                yield from self._end_arguments(self._open)
                self._open["status"] = "calling"  # its arguments are complete, and it runs
                self._running[event.call.id] = len(self.response["output"]) - 1
                self._open = None
            case events.CallEnded():
                yield from self._close("completed")
            case events.Intercepted():
                self._calls = event.calls
                yield from self._close("completed")  # the text of a turn that waits for its futures
                if earlier := [call.id for call in event.calls if call.id in self._futures.values()]:
                    yield self._event("response.trap", item_ids=self._items_of(earlier))
            case events.Resumed():
                yield from self._returned(Interception(self._calls, event.results))
                self._round += 1
            case events.Finished():
                yield from self._finish(event.output)
            case _:
                pass

    def cancel(self) -> None:
        """Mark the response as cancelled, by a request or because its client has disconnected."""
        self._cancelled = True

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """The events that end a response as failed or cancelled; none if it has ended."""
        if self.response["completed_at"] is not None:
            return
        yield from self._close("incomplete")
        yield from self._end_running_calls()
        if self._cancelled:
            yield self._last("cancelled", "response.incomplete")
        else:
            self.error = error
            self.response["error"] = {"code": "server_error", "message": error.detail}
            yield self._last("failed", "response.failed")

    def unsaved(self, error: ApiError, last: dict[str, Any]) -> dict[str, Any]:
        """The last event of a final response that could not be stored, in place of `last`: it has failed."""
        self.error = error
        self.response["error"] = {"code": error.code or "server_error", "message": error.detail}
        self.response |= {"status": "failed", "incomplete_details": None}
        return last | {"type": "response.failed"}

    async def settled(self, event: events.Finished) -> events.Finished:
        """The last event of the request, once the server's calls of the last turn are run."""
        return replace(event, output=await self._tool_calls.settled(event.output))

    def _finish(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        self._usage.add(output)
        self.response["usage"] = self._counted()
        try:
            check_finish(output)
        except ApiError as error:
            yield from self.fail(error)
            return
        if self._warms_up:
            yield self._last("completed", "response.completed")
            return
        [completion] = output.outputs
        for pause in completion.interceptions[self._round :]:
            yield from self._returned(pause)
        yield from self._end_running_calls()
        self._report(completion)
        status, items = "completed", self.response["output"]
        if completion.finish_reason == "length":
            reason = "max_tool_calls" if completion.stop_reason == "max_rounds" else "max_output_tokens"
            status, self.response["incomplete_details"] = "incomplete", {"reason": reason}
        elif completion.finish_reason != "tool_calls" and (not items or items[-1]["type"] != "message"):
            yield from self._say("message", "")  # an answer without text is an empty message
        yield from self._close(status)
        yield self._last(status, f"response.{status}")

    def _last(self, status: str, event: str) -> dict[str, Any]:
        self.response |= {"status": status, "completed_at": int(time.time())}
        return self._event(event, response=self.response)

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Add to a text item."""
        if not self._is(kind):
            text, self._blank = (self._blank + text if kind == "message" else text), ""
            text = text.lstrip() if self.response["output"] else text  # a blank line parts it from the item before
            yield from self._begin_text(kind)
        assert self._open is not None
        part = self._open["content"][0]
        more: dict[str, Any] = {"content_index": 0}
        if kind == "message":
            more["logprobs"] = self._logprobs(self._unread) if self._logprobs else []
            part["logprobs"] += more["logprobs"]
        self._unread.clear()
        if text:
            self._pieces.append(text)
            yield self._item_event(f"response.{part['type']}.delta", delta=text, **more)

    def _begin_text(self, kind: str) -> Iterator[dict[str, Any]]:
        fields = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._add(new_item(kind, "in_progress", **fields, content=[]))
        part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        assert self._open is not None
        self._open["content"].append(part)
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _call(self, started: events.CallStarted) -> Iterator[dict[str, Any]]:
        self._unread.clear()
        self._blank = ""
        note = {"round": self._round, "call_id": started.id}
        if started.name not in self._tool_calls.client_tools:
            yield from self._add(new_item("mcp_call", "in_progress", **server_call(started.name, note)))
            yield self._item_event("response.mcp_call.in_progress")
            return
        kind, fields = self._tools.call_fields(started.name)
        call = new_item(kind, "in_progress", call_id=started.id, **fields)
        yield from self._add(call | ({"jinfercept": note} if self._round else {}))

    def _end_arguments(self, item: Item) -> Iterator[dict[str, Any]]:
        text = "".join(self._pieces)
        self._pieces.clear()
        item[CLIENT_CALLS.get(item["type"], "arguments")] = value = client_call_value(item["type"], text)
        if item["type"] == "custom_tool_call":
            yield self._item_event("response.custom_tool_call_input.delta", delta=value)
            yield self._item_event("response.custom_tool_call_input.done", input=value)
        if item["type"] in _SHOWN_ARGUMENTS:
            name = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._item_event(f"response.{item['type']}_arguments.done", **name, arguments=text)

    def _returned(self, pause: Interception) -> Iterator[dict[str, Any]]:
        output = self.response["output"]
        returned = list(zip(pause.calls, pause.results, strict=False))
        if earlier := [call.id for call, _ in returned if call.id in self._futures.values()]:
            yield self._event("response.interrupt", item_ids=self._items_of(earlier))
        for call, result in returned:
            place, future = self._running.get(call.id), future_of(call, result)
            if place is None:
                continue
            if result.status == "started" and future is not None:
                self._futures[future] = call.id
                output[place]["jinfercept"] |= {"future": future, "read_after": None}
                yield self._event("response.mcp_call.started", item_id=output[place]["id"], output_index=place)
                continue
            if call.id in self._futures.values():
                output[place]["jinfercept"]["read_after"] = len(output) - place - 1
            yield from self._return(call.id, result)
            if future is not None and future in self._futures:  # the result of the call for which this one waited
                yield from self._return(self._futures[future], result)

    def _return(self, call_id: str, result: Result) -> Iterator[dict[str, Any]]:
        """Add a result to the item of its call, unless it has one."""
        place = self._running.pop(call_id, None)
        if place is None:
            return
        item, failed = self.response["output"][place], result.status in _FAILED
        item |= {"output": result.text, "status": "failed" if failed else "completed"}
        if failed:
            content = [{"type": "text", "text": result.text}]
            item["error"] = {"type": "mcp_tool_execution_error", "content": content}
        yield self._event(f"response.mcp_call.{item['status']}", item_id=item["id"], output_index=place)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _items_of(self, call_ids: Sequence[str]) -> list[str]:
        places = [self._running[call_id] for call_id in call_ids if call_id in self._running]
        return [self.response["output"][place]["id"] for place in places]

    def _end_running_calls(self) -> Iterator[dict[str, Any]]:
        for place in self._running.values():
            item = self.response["output"][place]
            item["status"] = "incomplete"
            yield self._event("response.output_item.done", output_index=place, item=item)
        self._running.clear()

    def _report(self, completion: CompletionOutput) -> None:
        reports = {report["id"]: report for report in call_reports(completion)}
        if "jinfercept" in self.response:
            unread = [{"id": call.id, "name": call.name} for call in completion.cancelled]
            more = {"cancelled": unread} if "cancelled" in self.response["jinfercept"] else {}
            self.response["jinfercept"] = {"server_calls": list(reports.values()), **more}
        for item in self.response["output"]:
            if item["type"] == "mcp_call" and (report := reports.get(item["jinfercept"]["call_id"])):
                item["jinfercept"] |= {key: report[key] for key in ("status", "seconds", "context")}

    def _add(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        self.response["output"].append(item)
        self._open = item
        yield self._item_event("response.output_item.added", item=item)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        if item["type"] in (*CLIENT_CALLS, "mcp_call"):
            yield from self._end_arguments(item)
        else:
            [part] = item["content"]
            part["text"] = text
            reported = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._item_event(f"response.{part['type']}.done", content_index=0, text=text, **reported)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._item_event("response.output_item.done", item=item)
        self._open = None
        self._pieces.clear()

    def _item_event(self, event: str, **fields: Any) -> dict[str, Any]:
        """An event of the open item; one that contains the item has no `item_id`."""
        assert self._open is not None
        name = {} if "item" in fields else {"item_id": self._open["id"]}
        return self._event(event, **name, output_index=len(self.response["output"]) - 1, **fields)

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": event, "sequence_number": self._number - 1, **fields}

    def _is(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _counted(self) -> dict[str, Any]:
        usage = self._usage.body()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
