"""`/v1/conversations` with OpenAI's client, in memory and in databases."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import ASKED, QUESTION, answer, says
from tests.support.scripted_model import Scripted

LONG: Any = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(params=["memory", "postgresql", pytest.param("sqlite", marks=pytest.mark.slow)])
def talking(request: pytest.FixtureRequest, scripted: Scripted) -> Iterator[Running]:
    """A server without a database, and one with each kind."""
    url = None
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_server").url
    elif request.param == "sqlite":
        url = request.getfixturevalue("state_path")
    with running(scripted.llm, state_url=url, api_key=("mine", "yours")) as server:
        yield server


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def test_a_conversation_is_created_changed_listed_and_deleted(talking: Running) -> None:
    conversations: Any = talking.client.conversations
    made = conversations.create(metadata={"topic": "a"}, items=[user(f"{i}") for i in range(5)])
    assert (made.id[:5], made.object, made.metadata) == ("conv_", "conversation", {"topic": "a"})
    assert conversations.retrieve(made.id) == made
    assert conversations.update(made.id, metadata={"topic": "b"}).metadata == {"topic": "b"}
    assert conversations.retrieve(made.id).metadata == {"topic": "b"}
    added = conversations.items.create(made.id, items=[user("5"), user("6")])
    assert (texts(added.data), added.has_more) == (["5", "6"], False)
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    assert texts(conversations.items.list(made.id, limit=2)) == list("6543210")  # the client turns pages
    ascending = conversations.items.list(made.id, limit=3, order="asc")
    assert (texts(ascending.data), ascending.has_more) == (["0", "1", "2"], True)
    item = conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert item == added.data[0]
    assert conversations.items.delete(item.id, conversation_id=made.id).id == made.id
    assert texts(conversations.items.list(made.id, order="asc")) == list("012346")
    for ask in (conversations.items.retrieve, conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            ask(item.id, conversation_id=made.id)
    deleted = conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for again in (conversations.retrieve, conversations.delete, conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            again(made.id)


def test_responses_add_their_turns_and_find_their_context(talking: Running, scripted: Scripted) -> None:
    made = talking.client.conversations.create(items=[user(QUESTION)])
    longer = [*ASKED, {"role": "user", "content": "In red?"}]
    says(scripted, "It costs 23." + END, longer)
    first = answer(talking, "In red?", conversation=made.id)
    assert (first.output_text, first.conversation.id) == ("It costs 23.", made.id)
    longer += [{"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "And two?"}]
    says(scripted, "46." + END, longer)
    second = answer(talking, "And two?", conversation={"id": made.id}, store=False)
    assert second.output_text == "46."
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    items: Any = talking.client.conversations.items
    turns = texts(items.list(made.id, order="asc"))
    assert turns == [QUESTION, "In red?", "It costs 23.", "And two?", "46."]
    with pytest.raises(openai.BadRequestError, match="this response belongs to a conversation: send"):
        answer(talking, "Well?", previous_response_id=first.id)
    referred = [{"type": "item_reference", "id": items.list(made.id).data[-1].id}]
    says(scripted, "23." + END)
    assert answer(talking, referred).output_text == "23."
    talking.client.conversations.delete(made.id)
    if talking.service.database.outlives:
        assert talking.client.responses.retrieve(first.id).output_text == "It costs 23."  # responses remain


@pytest.mark.usefixtures("gate")
def test_one_turn_at_a_time(talking: Running, scripted: Scripted) -> None:
    scripted.follow()
    conversations: Any = talking.client.conversations
    made = conversations.create(items=[user("a")])
    begun = answer(talking, "b", conversation=made.id, background=True, **LONG)
    for change in (
        lambda: answer(talking, "c", conversation=made.id),
        lambda: conversations.items.create(made.id, items=[user("c")]),
        lambda: conversations.items.delete(conversations.items.list(made.id).data[0].id, conversation_id=made.id),
    ):
        with pytest.raises(openai.ConflictError) as refused:
            change()
        assert refused.value.code == "conversation_locked"
    assert texts(conversations.items.list(made.id)) == ["a"]
    talking.client.responses.cancel(begun.id)
    conversations.items.create(made.id, items=[user("c")])
    assert texts(conversations.items.list(made.id)) == ["c", "a"]  # a turn that is cancelled leaves nothing
    wrong = talking.http.post(
        "/v1/responses",
        headers={"authorization": "Bearer mine"},
        json={"input": "x" * 3000, "conversation": made.id},
    )
    assert wrong.status_code == 400
    says(scripted, "d" + END, [{"role": "user", "content": text} for text in ("a", "c", "x")])
    until(lambda: _succeeds(lambda: answer(talking, "x", conversation=made.id)))  # a refused turn ends soon


def _succeeds(ask: Any) -> bool:
    try:
        ask()
    except openai.ConflictError:
        return False
    return True


def test_another_keys_conversation_is_as_good_as_missing(talking: Running) -> None:
    made = talking.client.conversations.create(items=[user("secret")])
    item: Any = talking.client.conversations.items.list(made.id).data[0]
    with OpenAI(base_url=f"{talking.url}/v1", api_key="yours", max_retries=0) as other:
        conversations: Any = other.conversations
        create: Any = other.responses.create
        asks: list[Callable[[str, str], Any]] = [
            lambda talk, _: conversations.retrieve(talk),
            lambda talk, _: conversations.update(talk, metadata={}),
            lambda talk, _: conversations.items.list(talk),
            lambda talk, _: conversations.items.create(talk, items=[user("mine")]),
            lambda talk, item: conversations.items.retrieve(item, conversation_id=talk),
            lambda talk, item: conversations.items.delete(item, conversation_id=talk),
            lambda talk, _: create(model=MODEL, input="Hi", conversation=talk),
            lambda _, item: create(model=MODEL, input=[{"type": "item_reference", "id": item}]),
            lambda talk, _: conversations.delete(talk),
        ]
        for ask in asks:
            answers: list[str] = []
            for ids in ((made.id, item.id), (f"conv_{'0' * 32}", f"msg_{'0' * 32}")):
                with pytest.raises(openai.NotFoundError) as refused:
                    ask(*ids)
                answers.append(refused.value.response.text.replace(ids[0], "it").replace(ids[1], "it"))
            assert answers[0] == answers[1]
    assert texts(talking.client.conversations.items.list(made.id)) == ["secret"]
    assert talking.http.post("/v1/conversations", json={}).status_code == 401


def test_wrong_bodies_are_named(talking: Running) -> None:
    cases: list[tuple[str, Any, int, str | None]] = [
        ("", {"items": 3}, 400, "items"),
        ("", {"items": [{"type": "computer_call"}]}, 400, "items[0]"),
        ("", {"items": [user("x")] * 21}, 400, "items"),
        ("", {"items": [{"type": "item_reference", "id": "\x00"}]}, 404, "items"),
        ("", {"metadata": {"a": 1}}, 400, "metadata"),
        ("", {"metadata": {f"{i}": "x" for i in range(17)}}, 400, "metadata"),
        ("", [], 400, None),
        ("/conv_0", {"metadata": {}}, 404, "conversation"),
        ("/%00", {"metadata": {}}, 404, "conversation"),
        ("/conv_0", {}, 400, "metadata"),
        ("/conv_0/items", {"items": []}, 404, "conversation"),
    ]
    for path, body, status, param in cases:
        refused = talking.http.post(f"/v1/conversations{path}", json=body, headers={"authorization": "Bearer mine"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


def test_pages_and_ids_that_are_wrong_are_errors(talking: Running) -> None:
    odd_item: Any = user("a\x00") | {"id": "\x00'\u2028"}
    made = talking.client.conversations.create(items=[odd_item])
    headers = {"authorization": "Bearer mine"}
    for query, status in (
        ("limit=0", 400),
        ("limit=101", 400),
        ("order=up", 400),
        ("after=x", 400),
        ("after=%00", 400),
    ):
        refused = talking.http.get(f"/v1/conversations/{made.id}/items?{query}", headers=headers)
        assert refused.status_code == status
    [item] = talking.http.get(f"/v1/conversations/{made.id}/items", headers=headers).json()["data"]
    assert (item["id"], item["content"][0]["text"]) == ("\x00'\u2028", "a\x00")
    for name in ("%00", "x" * 5000, "%ED%A0%80"):
        assert talking.http.get(f"/v1/conversations/{made.id}/items/{name}", headers=headers).status_code == 404


def test_a_conversation_has_so_many_items(talking: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinfercept.serve.protocols.openai.response_items.MAX_ITEMS", 3)
    made = talking.client.conversations.create(items=[user("a"), user("b")])
    for ask in (
        lambda: talking.client.conversations.items.create(made.id, items=[user("c"), user("d")]),
        lambda: answer(talking, [user("c"), user("d")], conversation=made.id),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.code == "too_many_items"
    talking.client.conversations.items.create(made.id, items=[user("c")])
