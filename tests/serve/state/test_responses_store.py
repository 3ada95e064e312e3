"""Stored responses: found by their tenants, listed, deleted, and expired."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from sqlalchemy import event

from jinfercept.serve.protocols.openai.response_items import new_item, read_items, references
from jinfercept.serve.protocols.openai.response_schemas import ResponsesBody
from jinfercept.serve.state.database import StateDatabase
from tests.support.engine_state import engine_state
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import ASKED, QUESTION, answer, says
from tests.support.scripted_model import Scripted


class Counted(dict[str, Any]):
    """An item that counts how often it is read."""

    num_reads = 0

    def __getitem__(self, name: str) -> Any:
        Counted.num_reads += 1
        return super().__getitem__(name)


def test_four_thousand_references_read_no_more_items_than_they_name() -> None:
    database = StateDatabase(None)
    items = [new_item("reasoning", summary=[], content=[]) for _ in range(4000)]
    database.transact(lambda entries: entries.insert(f"resp_{'0' * 32}", "me", {}, items))
    references_of = [{"type": "item_reference", "id": item["id"]} for item in items]
    body = ResponsesBody.model_validate({"input": references_of})
    statements: list[str] = []
    event.listen(database._engine, "before_cursor_execute", lambda *about: statements.append(about[2]))
    read = database.transact(lambda entries: entries.items_named("me", references(body.input)))
    assert len(statements) < 20
    assert not database.transact(lambda entries: entries.items_named("you", references(body.input)))
    database.close()
    Counted.num_reads = 0
    assert read_items(body.input, (), {name: Counted(item) for name, item in read.items()}) == items
    assert Counted.num_reads <= 3 * 4000


@pytest.mark.usefixtures("gate")
def test_items_of_a_response_in_the_background_are_found_while_it_is_generated(
    served: Running, scripted: Scripted
) -> None:
    says(scripted, "It costs 23. " * 40 + END)
    begun = answer(served, background=True)
    retrieve: Any = served.client.responses.retrieve
    until(lambda: bool(retrieve(begun.id).output))
    [item] = retrieve(begun.id).output
    referred = {"input": [{"type": "item_reference", "id": item.id}, *ASKED], "max_output_tokens": 1}
    assert served.http.post("/v1/responses", json=referred).status_code == 200
    served.client.responses.cancel(begun.id)


def test_a_conversation_has_so_many_items_those_that_say_nothing_among_them(
    served: Running, scripted: Scripted
) -> None:
    says(scripted, "23." + END)
    cut_off = {"status": "incomplete", "call_id": "call_1", "name": "price", "arguments": "{"}
    empty = {"type": "function_call", "id": "fc_1"} | cut_off
    items = [*[empty] * 4094, ASKED[0]]

    def post(**fields: Any) -> Any:
        return served.http.post("/v1/responses", json={"input": items, "max_output_tokens": 20} | fields)

    first = post()
    assert first.status_code == 200, first.text
    name = first.json()["id"]
    for refused in (
        post(input=[empty, *items, *ASKED]),
        post(input="And two?", previous_response_id=name),
        post(input=[{"type": "item_reference", "id": "fc_1"}] * 4097),
    ):
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "input"
    assert "4096 items" in post(input="And two?", previous_response_id=name).json()["error"]["message"]
    reference_items = [{"type": "item_reference", "id": "fc_1"}] * 4095
    assert post(input=[*reference_items, ASKED[0]]).status_code == 200


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
                lambda response_id: responses.input_items.list(response_id).data,
                lambda response_id: responses.create(model=MODEL, input="Hi", previous_response_id=response_id),
            ):
                told: list[tuple[str, dict[str, str]]] = []
                for requested_id in (name, f"resp_{'0' * 32}"):
                    with pytest.raises(openai.NotFoundError) as refused:
                        ask(requested_id)
                    headers = {key: refused.value.response.headers[key] for key in refused.value.response.headers}
                    shown = {key: value for key, value in headers.items() if key not in ("date", "x-request-id")}
                    told.append((refused.value.response.text.replace(requested_id, "it"), shown))
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
    monkeypatch.setattr("jinfercept.serve.routes.conversations._PAGE_BYTES", 300)
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
