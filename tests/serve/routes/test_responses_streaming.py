"""The typed events of `/v1/responses`, and responses whose client has disconnected."""

import json
from typing import Any

import openai
import pytest

from jinfercept.models.protocol import Params
from tests.support.engine_state import engine_state
from tests.support.gate import Gate
from tests.support.live_server import END, Running, running, until
from tests.support.responses import CALL, CHAT_PRICE, PEN, PRICE, answer, says
from tests.support.scripted_model import Scripted

LONG: Any = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}


def kinds_of(events: list[Any]) -> list[str]:
    """The types of events, without repetition."""
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kind != kinds[place - 1]]


def check(events: list[Any]) -> Any:
    """Checks sequence numbers, and deltas against the last event; returns the final response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[place] for place in range(len(done))] == final.output
    for place, item in done.items():
        streamed = "".join(e.delta for e in events if e.type.endswith(".delta") and e.output_index == place)
        assert streamed == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert {getattr(e, "item_id", item.id) for e in events if getattr(e, "output_index", None) == place} == {
            item.id
        }
    return final


def test_a_text_comes_in_typed_events(served: Running, scripted: Scripted) -> None:
    says(scripted, "<think>A lamp?</think>It costs 23." + END)
    events = list(answer(served, stream=True))
    assert kinds_of(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    final = check(events)
    assert (final.status, final.output_text) == ("completed", "It costs 23.")
    assert final.usage.output_tokens_details.reasoning_tokens == len("<think>A lamp?")
    whole = answer(served)
    assert [item.model_dump(exclude={"id"}) for item in whole.output] == [
        item.model_dump(exclude={"id"}) for item in final.output
    ]
    assert served.client.responses.retrieve(final.id) == final


def test_calls_come_in_typed_events_without_the_blanks_between_them(served: Running, scripted: Scripted) -> None:
    says(scripted, CALL + "\n" + PEN + END, tools=[CHAT_PRICE])
    events = list(answer(served, stream=True, tools=[PRICE]))
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds_of(events) == ["created", "in_progress", *call, *call, "completed"]
    final = check(events)
    assert [json.loads(item.arguments)["item"] for item in final.output] == ["lamp", "pen"]
    assert [item.status for item in final.output] == ["completed", "completed"]


def test_a_response_in_the_background_is_polled(served: Running, scripted: Scripted) -> None:
    says(scripted, "It costs 23." + END)
    begun = answer(served, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    retrieve = served.client.responses.retrieve
    until(lambda: retrieve(begun.id).status not in ("queued", "in_progress"))
    done = retrieve(begun.id)
    assert (done.status, done.output_text) == ("completed", "It costs 23.")
    assert served.client.responses.cancel(begun.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="the events of this response are not kept here"):
        retrieve(begun.id, stream=True)


@pytest.mark.usefixtures("gate")
def test_a_response_in_the_background_is_cancelled(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    begun = answer(served, background=True, **LONG)
    until(lambda: served.client.responses.retrieve(begun.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        answer(served, previous_response_id=begun.id)
    cancelled: Any = served.client.responses.cancel(begun.id)
    assert not engine_state(served.llm).has_work
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    assert [item.status for item in cancelled.output] == ["incomplete"]
    assert served.client.responses.cancel(begun.id) == cancelled


def test_a_stream_in_the_background_goes_on_without_its_reader_and_is_read_again(
    served: Running, scripted: Scripted
) -> None:
    says(scripted, "It costs 23. " * 20 + END)
    stream = answer(served, background=True, stream=True)
    events = [event for event, _ in zip(stream, range(6), strict=False)]
    stream.close()
    assert kinds_of(events)[:3] == ["created", "queued", "in_progress"]
    retrieve: Any = served.client.responses.retrieve
    name = events[0].response.id
    events += list(retrieve(name, stream=True, starting_after=events[-1].sequence_number))
    assert check(events).output_text == "It costs 23. " * 20
    assert len(list(retrieve(name, stream=True))) == len(events)


@pytest.mark.usefixtures("gate")
def test_a_response_that_is_deleted_is_not_written_to_its_end(served: Running, scripted: Scripted) -> None:
    scripted.follow()
    begun = answer(served, background=True, **LONG)
    served.client.responses.delete(begun.id)
    assert not engine_state(served.llm).has_work
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve(begun.id)


@pytest.mark.usefixtures("gate")
def test_what_a_drain_gives_up_ends_as_failed(scripted: Scripted) -> None:
    scripted.follow()
    with running(scripted.llm, drain_timeout=0.0) as server:
        answer(server, background=True, **LONG)
        events = iter(answer(server, stream=True, **LONG))
        next(events)
        server.server.handle_exit(15, None)
        last = list(events)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    assert "the server aborted the request" in last.response.error.message
    assert not engine_state(scripted.llm).has_work


def test_an_engine_that_fails_fails_the_response(scripted: Scripted, gate: Gate) -> None:
    scripted.follow()
    runner = scripted.runner
    whole = runner.params
    with running(scripted.llm) as server:
        events = iter(answer(server, stream=True, **LONG))
        next(events)
        runner.params = Params({}, (), {})
        gate.open()
        last = list(events)[-1]
        runner.params = whole
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "the engine failed" in last.response.error.message
