"""Stored responses: found by their owners, listed, deleted, and gone after a while."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from responding import ASKED, QUESTION, answer, says
from scripted_model import Scripted
from served import END, MODEL, Running, running, until

from jinfercept.server.errors import ApiError
from jinfercept.server.responses_items import new_item
from jinfercept.server.responses_store import ResponseStore, Stored


def stored(name: str, owner: str = "me", status: str = "completed", before: str | None = None) -> Stored:
    """One that says little."""
    response = {"id": name, "status": status, "output": [], "previous_response_id": before}
    said = new_item("message", role="user", content=[])
    return Stored(owner, response, [], [said], Nobody() if status == "queued" else None)


class Nobody:
    """Writes nothing, in the background, at length."""

    num_bytes = 900

    async def cancel(self) -> None:
        raise AssertionError

    def follow(self, start: int) -> Any:
        raise AssertionError


def has(store: ResponseStore, name: str, now: float, owner: str = "me") -> bool:
    try:
        return store.get(name, owner, now).response["id"] == name
    except ApiError:
        return False


def test_a_response_is_stored_for_a_while() -> None:
    store = ResponseStore(10.0, 9)
    store.add(stored("a"), 0.0)
    store.add(stored("b"), 5.0)
    assert has(store, "a", 9.9)
    assert not has(store, "a", 10.0)
    assert has(store, "b", 10.0)
    assert not has(store, "b", 15.0)
    assert len(store) == 0


def test_the_oldest_go_first_but_not_what_is_still_written() -> None:
    store = ResponseStore(10.0, 2)
    store.add(stored("a", status="queued"), 0.0)
    for name in "bcd":
        store.add(stored(name), 1.0)
    assert [has(store, name, 2.0) for name in "abcd"] == [True, False, False, True]
    assert has(store, "a", 99.0)


def test_no_more_is_stored_than_fits() -> None:
    store = ResponseStore(10.0, 99, most_bytes=1000)
    for name, before in (("a", None), ("b", "a"), ("c", "b")):
        store.add(stored(name, before=before), 0.0)
    assert [has(store, name, 0.0) for name in "abc"] == [False, True, True]
    events = stored("e", status="queued")
    store.add(events, 0.0)
    events.response["status"] = "completed"
    store.add(stored("f"), 0.0)
    assert [has(store, name, 0.0) for name in "bcef"] == [False, False, False, True]


def test_only_the_owner_finds_a_response_and_its_items() -> None:
    store = ResponseStore(10.0, 9)
    mine = stored("a")
    store.add(mine, 0.0)
    assert not has(store, "a", 0.0, "you")
    name = mine.asked[0]["id"]
    assert store.item(name, "me", 0.0) == mine.asked[0]
    with pytest.raises(ApiError, match="no item"):
        store.item(name, "you", 0.0)


def test_another_keys_response_is_as_good_as_missing(scripted: Scripted) -> None:
    says(scripted, "23." + END)
    with running(scripted.llm, api_key=("mine", "yours")) as server:
        name = answer(server).id
        with OpenAI(base_url=f"{server.url}/v1", api_key="yours", max_retries=0) as other:
            responses: Any = other.responses
            for ask in (
                responses.retrieve,
                responses.delete,
                responses.cancel,
                lambda one: responses.input_items.list(one).data,
                lambda one: responses.create(model=MODEL, input="Hi", previous_response_id=one),
            ):
                told: list[str] = []
                for one in (name, "resp_missing"):
                    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as refused:
                        ask(one)
                    told.append(f"{refused.value.status_code} {refused.value.body}".replace(one, "it"))
                assert told[0] == told[1]
        assert server.client.responses.retrieve(name).output_text == "23."


def test_what_is_deleted_is_missing_afterwards(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    name = answer(served).id
    assert served.llm.engine.num_kept == 1
    deleted = served.http.delete(f"/v1/responses/{name}")
    assert deleted.json() == {"id": name, "object": "response", "deleted": True}
    until(lambda: served.llm.engine.num_kept == 0)
    responses: Any = served.client.responses
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        responses.delete(name)
    with pytest.raises(openai.BadRequestError) as refused:
        answer(served, previous_response_id=name)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_the_items_that_a_response_answers_are_listed_page_by_page(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    first = answer(served)
    longer = [*ASKED, {"role": "assistant", "content": "23."}, {"role": "user", "content": "And two?"}]
    says(scripted, "46." + END, longer)
    second = answer(served, "And two?", previous_response_id=first.id)
    listed: Any = served.client.responses.input_items.list
    items = listed(second.id, order="asc").data
    assert [item.content[0].text for item in items] == [QUESTION, "23.", "And two?"]
    assert items[1] == first.output[0]
    assert [item.id for item in listed(second.id).data] == [item.id for item in reversed(items)]
    page = listed(second.id, order="asc", limit=2)
    assert (page.has_more, page.last_id) == (True, items[1].id)
    assert [item.id for item in page] == [item.id for item in items]  # the client turns the pages
    with pytest.raises(openai.BadRequestError, match="no item"):
        listed(second.id, after="msg_0")


def test_only_what_is_in_the_background_can_be_cancelled_or_streamed_again(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    name = answer(served).id
    responses: Any = served.client.responses
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.cancel(name)
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.retrieve(name, stream=True)
