"""Stored responses: found by their owners, listed, deleted, and expired."""

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item, new_item, read_items, references
from jinfercept.protocols.openai.response_schemas import ResponsesBody
from jinfercept.server.state.response_store import ResponseStore
from jinfercept.server.state.stored_response import StoredResponse, measured
from tests.support.engine_state import engine_state
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import ASKED, QUESTION, answer, says
from tests.support.scripted_model import Scripted


def stored(
    name: str,
    owner: str = "me",
    status: str = "completed",
    previous: StoredResponse | None = None,
    num_bytes: int = 100,
) -> StoredResponse:
    """A response with little text; in the background while it is queued."""
    response = {"id": name, "status": status, "output": [], "previous_response_id": previous and previous.name}
    said = new_item("message", role="user", content=[])
    background = Silent() if status == "queued" else None
    return StoredResponse(owner, response, previous, [said], background, num_bytes)


class Silent:
    """A background run without output that does not end."""

    async def cancel(self) -> None:
        raise AssertionError

    def follow(self, start: int) -> Any:
        raise AssertionError


class Counted(dict[str, Any]):
    """An item that counts how often it is read."""

    num_reads = 0

    def __getitem__(self, name: str) -> Any:
        Counted.num_reads += 1
        return super().__getitem__(name)


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
    store = ResponseStore(10.0, 99, most_bytes=250)
    for name in "abc":
        store.add(stored(name), 0.0)
    assert [has(store, name, 0.0) for name in "abc"] == [False, True, True]


def test_events_count_while_they_are_kept_and_outputs_once_they_are_whole() -> None:
    store = ResponseStore(10.0, 99, most_bytes=10_000)
    store.add(stored("a"), 0.0)
    running = stored("b", status="queued")
    store.add(running, 0.0)
    assert store.charge("b", 9_850)
    assert not has(store, "a", 0.0)
    assert store.charge("b", 50)
    assert not store.charge("b", 1)  # nothing else can be dropped
    assert store.charge("b", -9_900)
    store.add(stored("c"), 0.0)
    running.response["output"].append(new_item("message", role="assistant", content=[{"text": "x" * 20_000}]))
    running.response["status"] = "completed"
    store.settle("b")
    assert [has(store, name, 0.0) for name in "abc"] == [False, False, True]
    assert store.charge("b", 1_000_000)  # it is not stored any more


def test_log_probabilities_count_and_one_is_measured_for_all() -> None:
    def said(number: int) -> list[Item]:
        reports = [{"token": f"{place}", "logprob": -1.0, "top_logprobs": [{}]} for place in range(number)]
        return [new_item("message", content=[{"type": "output_text", "text": "", "logprobs": reports}])]

    assert 300_000 < measured(said(1000)) - measured(said(0)) < 1_000_000
    assert measured([new_item("function_call", jinfercept={"logprobs": ["", "x" * 50_000]})]) > 50_000


def test_a_conversation_holds_its_beginning_once_for_as_long_as_anything_goes_on_from_it() -> None:
    store = ResponseStore(10.0, 99, most_bytes=100_000)
    last: StoredResponse | None = None
    for name in "abcdefgh":
        last = stored(name, previous=last, num_bytes=9_900)
        store.add(last, 0.0)
    assert last is not None
    assert (len(store), last.num_items, len(last.conversation)) == (8, 8, 8)
    for name in "abcdefg":
        store.delete(name, "me", 0.0)
    for name in "ijk":  # 79,200 bytes of the conversation are still there
        store.add(stored(name, num_bytes=9_900), 0.0)
    assert [has(store, name, 0.0) for name in "hijk"] == [False, True, True, True]
    for name in "lmnopqr":  # and now they are not
        store.add(stored(name, num_bytes=9_900), 0.0)
    assert len(store) == 10
    store.add(
        stored("s", previous=last, num_bytes=9_900), 0.0
    )  # what it goes on from was dropped while it was prepared
    assert [has(store, name, 0.0) for name in "qrs"] == [False, True, True]


@pytest.mark.parametrize("most_bytes", [10**9, 2500])
def test_a_key_that_stores_much_costs_another_key_nothing(most_bytes: int) -> None:
    store = ResponseStore(10.0, 25, most_bytes=most_bytes)
    store.add(stored("mine", "polite"), 0.0)
    for number in range(200):
        store.add(stored(f"{number}", "hostile"), 0.0)
    for number in range(30):
        store.add(stored(f"open {number}", "hostile", status="queued"), 0.0)
    assert has(store, "mine", 0.0, "polite")
    store.add(stored("mine too", "polite"), 0.0)
    assert has(store, "mine", 0.0, "polite")
    assert has(store, "mine too", 0.0, "polite")
    assert not has(store, "199", 0.0, "hostile")


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "background", "events", "settle", "delete"]),
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, 5),  # which of the owner's, the youngest first; what is added goes on from it
            st.integers(0, 4000),
        ),
        max_size=40,
    ),
    most=st.integers(0, 9),
    most_bytes=st.integers(0, 20_000),
)
def test_whatever_keys_do_one_that_holds_an_equal_share_at_most_loses_nothing_and_bytes_are_those_that_are_held(
    steps: list[tuple[str, str, int, int]], most: int, most_bytes: int
) -> None:
    store = ResponseStore(1e9, most, most_bytes)
    mine: dict[str, list[StoredResponse]] = {"a": [], "b": [], "c": []}
    for number, (what, owner, which, num_bytes) in enumerate(steps):
        stands = {key: [one for one in ones if has(store, one.name, 0.0, key)] for key, ones in mine.items()}
        chosen = stands[owner][-1 - which] if which < len(stands[owner]) else None
        if what in ("add", "background"):
            finished = chosen if chosen and not chosen.is_open else None
            status = "queued" if what == "background" else "completed"
            new = stored(f"{number}", owner, status, finished, num_bytes)
            mine[owner].append(new)
            stands[owner].append(new)
            store.add(new, 0.0)
        elif chosen is None:
            continue
        elif what == "events":
            store.charge(chosen.name, num_bytes)
        elif what == "settle":
            chosen.response["status"] = "completed"
            store.settle(chosen.name)
        else:
            store.delete(chosen.name, owner, 0.0)
            stands[owner].remove(chosen)
        held = {key: {id(one): one for last in ones for one in chain(last)} for key, ones in stands.items()}
        sizes = {key: sum(one.num_bytes for one in ones.values()) for key, ones in held.items()}
        num_keys = sum(map(bool, stands.values())) or 1
        for key, ones in stands.items():
            if len(ones) <= most / num_keys and sizes[key] <= most_bytes / num_keys:
                assert all(has(store, one.name, 0.0, key) for one in ones)
        left = [one for key, ones in stands.items() for one in ones if has(store, one.name, 0.0, key)]
        counted = {key: holding.num_bytes for key, holding in store._quota._holdings.items()}
        for key in mine:
            kept = {id(one): one.num_bytes for last in left if last.owner == key for one in chain(last)}
            assert counted.get(key, 0) == sum(kept.values())


def chain(last: StoredResponse) -> list[StoredResponse]:
    """A response and all that it continues."""
    return [last, *(chain(last.previous) if last.previous else [])]


def test_a_key_has_limits_of_its_own() -> None:
    store = ResponseStore(10.0, 25, most_of_owner=2, most_bytes_of_owner=250, most_background=1)
    for name in "abc":
        store.add(stored(name), 0.0)
    assert [has(store, name, 0.0) for name in "abc"] == [False, True, True]
    store.add(stored("d", num_bytes=200), 0.0)
    assert [has(store, name, 0.0) for name in "bcd"] == [False, False, True]
    store.check_background("me")
    running = stored("e", status="queued")
    store.add(running, 0.0)
    with pytest.raises(ApiError) as refused:
        store.check_background("me")
    assert (refused.value.status_code, (refused.value.headers or {})["Retry-After"]) == (429, "1")
    store.check_background("you")
    running.response["status"] = "completed"
    store.settle("e")
    store.check_background("me")


def test_only_the_owner_finds_a_response_and_its_items() -> None:
    store = ResponseStore(10.0, 9)
    mine = stored("a")
    store.add(mine, 0.0)
    assert not has(store, "a", 0.0, "you")
    name = mine.asked[0]["id"]
    assert store.items([name], "me", 0.0) == {name: mine.asked[0]}
    assert not store.items([name], "you", 0.0)


def test_items_are_found_while_they_are_stored_the_oldest_of_those_with_the_same_id() -> None:
    store = ResponseStore(10.0, 9)
    first, second = stored("a", status="queued"), stored("b")
    store.add(first, 0.0)
    written = new_item("message", role="assistant", content=[])
    first.response["output"].append(written)
    assert store.items([written["id"]], "me", 0.0)[written["id"]] is written  # while it is in the background
    later = new_item("message", role="assistant", content=[])
    first.response["output"].append(later)
    copies = [dict(later), dict(later), dict(written)]
    second.asked = copies
    store.add(second, 1.0)
    assert store.items([later["id"]], "me", 1.0)[later["id"]] is later
    first.response["status"] = "completed"
    store.settle("a")
    store.delete("a", "me", 1.0)
    assert store.items([later["id"]], "me", 1.0)[later["id"]] is copies[0]
    assert store.items([written["id"], first.asked[0]["id"]], "me", 1.0) == {written["id"]: copies[2]}
    assert not store.items([later["id"]], "me", 11.0)
    assert not store._items
    assert not store._open


def test_four_thousand_references_read_no_more_items_than_they_name() -> None:
    store = ResponseStore(10.0, 9)
    items = [Counted(new_item("reasoning", summary=[], content=[])) for _ in range(4000)]
    many = stored("a")
    many.asked = items
    store.add(many, 0.0)
    body = ResponsesBody.model_validate({"input": [{"type": "item_reference", "id": dict(i)["id"]} for i in items]})
    Counted.num_reads = 0
    found = store.items(references(body.input), "me", 0.0)
    assert read_items(body.input, (), found) == items
    assert Counted.num_reads <= 3 * 4000


def test_a_conversation_has_so_many_items_those_that_say_nothing_among_them(
    served: Running, scripted: Scripted
) -> None:
    says(scripted, "23." + END)
    cut_off = {"status": "incomplete", "call_id": "call_1", "name": "price", "arguments": "{"}
    empty = {"type": "function_call", "id": "fc_1"} | cut_off
    asked = [*[empty] * 4094, ASKED[0]]

    def post(**fields: Any) -> Any:
        return served.http.post("/v1/responses", json={"input": asked, "max_output_tokens": 20} | fields)

    first = post()
    assert first.status_code == 200, first.text
    name = first.json()["id"]
    for refused in (
        post(input=[empty, *asked, *ASKED]),
        post(input="And two?", previous_response_id=name),
        post(input=[{"type": "item_reference", "id": "fc_1"}] * 4097),
    ):
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "input"
    assert "4096 items" in post(input="And two?", previous_response_id=name).json()["error"]["message"]
    said = [{"type": "item_reference", "id": "fc_1"}] * 4095
    assert post(input=[*said, ASKED[0]]).status_code == 200


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
                told: list[tuple[str, dict[str, str]]] = []
                for one in (name, f"resp_{'0' * 32}"):
                    with pytest.raises(openai.NotFoundError) as refused:
                        ask(one)
                    headers = {key: refused.value.response.headers[key] for key in refused.value.response.headers}
                    shown = {key: value for key, value in headers.items() if key not in ("date", "x-request-id")}
                    told.append((refused.value.response.text.replace(one, "it"), shown))
                assert told[0] == told[1]
        assert server.client.responses.retrieve(name).output_text == "23."


def test_what_is_deleted_is_missing_afterwards(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    name = answer(served).id
    assert engine_state(served.llm).num_retained == 1
    deleted = served.http.delete(f"/v1/responses/{name}")
    assert deleted.json() == {"id": name, "object": "response", "deleted": True}
    until(lambda: engine_state(served.llm).num_retained == 0)
    responses: Any = served.client.responses
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        responses.delete(name)
    with pytest.raises(openai.NotFoundError) as refused:
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


def test_a_page_of_long_items_ends_before_its_limit(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "23." + END, [*ASKED, *ASKED, *ASKED])
    name = answer(served, [*ASKED, *ASKED, *ASKED]).id
    monkeypatch.setattr("jinfercept.server.routes.responses._PAGE_BYTES", 300)
    page: Any = served.client.responses.input_items.list(name)
    assert (len(page.data), page.has_more) == (2, True)
    assert len(list(page)) == 3


def test_only_what_is_in_the_background_can_be_cancelled_or_streamed_again(served: Running, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    name = answer(served).id
    responses: Any = served.client.responses
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.cancel(name)
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.retrieve(name, stream=True)
