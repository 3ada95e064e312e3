"""Rows of the stored state: two servers on one database, in any order, and limits."""

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import new_item
from jinfercept.state import conversation_rows, response_rows, upkeep
from jinfercept.state.conversation_rows import StoredConversation
from jinfercept.state.database import StateDatabase
from jinfercept.state.queries import ServerClock
from jinfercept.state.response_rows import ResponseDocuments
from jinfercept.state.tables import ResponseItemRow, ResponseRow
from jinfercept.state.upkeep import StateLimits

SERVERS = ServerClock("first", 60.0), ServerClock("second", 60.0)
NO_LIMITS = StateLimits(2**60, None)


@pytest.fixture
def databases(state_url: str) -> Iterator[tuple[StateDatabase, StateDatabase]]:
    """One database, as two servers have it open."""
    both = StateDatabase(state_url), StateDatabase(state_url)
    for database, server in zip(both, SERVERS, strict=True):
        database.run_now(lambda session, server=server: upkeep.beat(session, server, ()))
    yield both
    for database in both:
        database.close()


def begun(previous: str | None = None, text: str = "", background: bool = False) -> ResponseDocuments:
    """A response that begins, with one item of input."""
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "status": "in_progress",
        "background": background,
        "created_at": 1,
        "output": [],
        "previous_response_id": previous,
    }
    return ResponseDocuments(response, [new_item("message", role="user", content=[{"text": text}])])


def insert(database: StateDatabase, server: ServerClock, tenant: str, documents: ResponseDocuments) -> int:
    return database.run_now(
        lambda session: response_rows.insert_response(
            session, server, tenant, documents, ttl_s=100.0, most_background=9
        )
    )


def settle(
    database: StateDatabase, server: ServerClock, tenant: str, documents: ResponseDocuments, begun_bytes: int
) -> int | None:
    documents.response["status"] = "completed"
    documents.response["output"] = [new_item("message", role="assistant", content=[])]
    return database.run_now(
        lambda session: response_rows.settle_response(session, server, tenant, documents, begun_bytes)
    )


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "add", "add", "delete", "sweep"]), st.integers(0, 1), st.integers(0, 9)),
        min_size=5,
        max_size=20,
    )
)
def test_conversations_stay_whole_whatever_two_servers_add_delete_and_sweep(
    databases: tuple[StateDatabase, StateDatabase], steps: list[tuple[str, int, int]]
) -> None:
    tenant = uuid.uuid4().hex
    chains: dict[str, list[str]] = {}  # of what is not deleted, the youngest first
    for step, place, which in steps:
        database, server = databases[place], SERVERS[place]
        chosen = list(chains)[-1 - which] if which < len(chains) else None
        if step == "add":
            documents = begun(chosen)
            number = insert(database, server, tenant, documents)
            assert insert(database, server, tenant, documents) == number  # an attempt that is repeated changes nothing
            assert settle(database, server, tenant, documents, number)
            assert database.run_now(
                lambda session, d=documents, n=number, s=server: response_rows.settle_response(session, s, tenant, d, n)
            )
            chains[documents.response["id"]] = [documents.response["id"], *(chains[chosen] if chosen else ())]
        elif step == "delete" and chosen is not None:
            database.run_now(lambda session, name=chosen: response_rows.delete_response(session, name, tenant))
            del chains[chosen]
        elif step == "sweep":
            database.run_now(lambda session, server=server: upkeep.sweep(session, server, NO_LIMITS))

        def read(session: Session, server: ServerClock = server) -> dict[str, list[str]]:
            heads = {name: response_rows.read_head(session, server, name, tenant) for name in chains}
            return {name: [row_id for row_id, _ in head.chain] for name, head in heads.items() if head is not None}

        assert database.run_now(read) == chains
    for name in chains:
        databases[0].run_now(lambda session, name=name: response_rows.delete_response(session, name, tenant))
    databases[1].run_now(lambda session: upkeep.sweep(session, SERVERS[1], NO_LIMITS))
    for table in (ResponseRow, ResponseItemRow):
        number = select(func.count()).where(table.tenant == tenant)
        assert databases[0].run_now(lambda session, number=number: session.scalar(number)) == 0


def test_a_response_that_continues_one_that_is_gone_is_404(databases: tuple[StateDatabase, StateDatabase]) -> None:
    for previous in ("resp_" + "0" * 32, None):
        documents = begun(previous)
        if previous is None:
            insert(databases[0], SERVERS[0], "me", documents)
            continue
        with pytest.raises(ApiError) as refused:
            insert(databases[0], SERVERS[0], "me", documents)
        assert (refused.value.status_code, refused.value.code) == (404, "previous_response_not_found")


def test_what_a_lost_server_has_left_fails_at_a_sweep_and_its_turns_are_free(
    databases: tuple[StateDatabase, StateDatabase],
) -> None:
    database, tenant, lost = databases[0], uuid.uuid4().hex, ServerClock("lost", 60.0)
    documents = begun(background=True)
    response_id, conversation_id = documents.response["id"], f"conv_{uuid.uuid4().hex}"
    made = StoredConversation(conversation_id, 1.0, {})
    database.run_now(lambda session: upkeep.beat(session, lost, (response_id,)))
    number = insert(database, lost, tenant, documents)
    database.run_now(lambda session: conversation_rows.create_conversation(session, tenant, made, (), 100.0))

    def begin(server: ServerClock, name: str) -> Any:
        return databases[1].run_now(
            lambda session: conversation_rows.begin_turn(session, server, conversation_id, tenant, name, 1)
        )

    begin(lost, response_id)
    with pytest.raises(ApiError, match="another response is being generated"):
        begin(SERVERS[1], "other")
    impatient = ServerClock("first", 0.0)
    databases[1].run_now(lambda session: upkeep.sweep(session, impatient, NO_LIMITS))
    head = database.run_now(lambda session: response_rows.read_head(session, SERVERS[0], response_id, tenant))
    assert head is not None
    assert head.status == "failed"
    assert settle(database, lost, tenant, documents, number) is None  # what has failed stays failed
    assert begin(SERVERS[1], "other").items == []
    for database, server in zip(databases, SERVERS, strict=True):
        database.run_now(lambda session, server=server: upkeep.beat(session, server, ("other",)))


def test_a_server_that_sweeps_late_keeps_its_own(databases: tuple[StateDatabase, StateDatabase]) -> None:
    tenant, late, documents = uuid.uuid4().hex, ServerClock(SERVERS[0].server_id, -1.0), begun()
    number = insert(databases[0], SERVERS[0], tenant, documents)
    databases[0].run_now(lambda session: upkeep.sweep(session, late, NO_LIMITS))
    assert settle(databases[0], SERVERS[0], tenant, documents, number) is not None


def test_beyond_a_limit_a_key_loses_its_oldest_and_modest_keys_nothing(
    databases: tuple[StateDatabase, StateDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_AT_ONCE", 2)  # it takes several sweeps
    database, modest, greedy = databases[0], uuid.uuid4().hex, uuid.uuid4().hex
    names: dict[str, list[str]] = {modest: [], greedy: []}
    for tenant, number in ((modest, 2), (greedy, 12)):
        for _ in range(number):
            documents = begun(text="x" * 10_000)
            settle(database, SERVERS[0], tenant, documents, insert(database, SERVERS[0], tenant, documents))
            names[tenant].append(documents.response["id"])
    limits, num_sweeps = StateLimits(2**60, 60_000), 1
    while database.run_now(lambda session: upkeep.sweep(session, SERVERS[0], limits)):
        num_sweeps += 1
    assert num_sweeps > 2

    def left(tenant: str) -> list[str]:
        mine = select(ResponseRow.id).where(ResponseRow.tenant == tenant).order_by(ResponseRow.created_at)
        return list(database.run_now(lambda session: session.scalars(mine).all()))

    assert left(modest) == names[modest]
    assert left(greedy) == names[greedy][-len(left(greedy)) :]
    assert 3 <= len(left(greedy)) <= 5


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000)),
    most=st.integers(0, 3000),
    own=st.none() | st.integers(0, 600),
)
def test_excess_makes_all_fit_and_takes_nothing_from_who_holds_an_equal_share(
    sizes: dict[str, int], most: int, own: int | None
) -> None:
    over = upkeep.excess(sizes, most, own)
    kept = {tenant: size - over.get(tenant, 0) for tenant, size in sizes.items()}
    assert sum(kept.values()) <= most
    assert all(size >= 0 for size in kept.values())
    if own is not None:
        assert all(size <= own for size in kept.values())
    for tenant, size in sizes.items():
        if size <= most // len(sizes) and (own is None or size <= own):
            assert kept[tenant] == size
    if own is None and over:
        assert sum(kept.values()) > most - len(sizes)  # and no more than needed


def test_turns_of_two_servers_at_once_follow_one_another(databases: tuple[StateDatabase, StateDatabase]) -> None:
    tenant, conversation_id = uuid.uuid4().hex, f"conv_{uuid.uuid4().hex}"
    made = StoredConversation(conversation_id, 1.0, {})
    databases[0].run_now(lambda session: conversation_rows.create_conversation(session, tenant, made, (), 100.0))
    seen: list[list[str]] = []

    def talk(place: int) -> None:
        for turn in range(5):
            name = f"{place}-{turn}"
            while True:
                try:
                    begun = databases[place].run_now(
                        lambda session, name=name: conversation_rows.begin_turn(
                            session, SERVERS[place], conversation_id, tenant, name, 1
                        )
                    )
                    break
                except ApiError:  # locked
                    continue
            seen.append([item["name"] for item in begun.items])
            item = new_item("message", name=name)
            databases[place].run_now(
                lambda session, name=name, item=item: conversation_rows.end_turn(
                    session, conversation_id, tenant, name, [item], 100.0
                )
            )

    clients = [threading.Thread(target=talk, args=(place,)) for place in (0, 1)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert sorted(map(len, seen)) == list(range(10))
    longest = max(seen, key=len)
    assert all(names == longest[: len(names)] for names in seen)
