"""Rows of the stored state: two servers on one database, in any order, and limits."""

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.protocols.openai.response_items import new_item
from jinfercept.serve.state import conversations
from jinfercept.serve.state.database import StateDatabase
from jinfercept.serve.state.entries import Entries, StateLimits, excess

NO_LIMITS = StateLimits()


@pytest.fixture
def databases(state_url: str) -> Iterator[tuple[StateDatabase, StateDatabase]]:
    """One database, as two servers have it open."""
    both = StateDatabase(state_url), StateDatabase(state_url)
    yield both
    for database in both:
        database.close()


def add(database: StateDatabase, tenant: str, previous: str | None = None, text: str = "") -> str:
    """Store a response with an item; returns its id."""
    name, item = f"resp_{uuid.uuid4().hex}", new_item("message", role="user", content=[{"text": text}])
    database.transact(lambda entries: entries.insert(name, tenant, {"id": name}, [item], first=-1, previous=previous))
    return name


def sweep(database: StateDatabase, limits: StateLimits = NO_LIMITS) -> None:
    while database.transact(lambda entries: entries.tend((), limits)):
        pass


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "add", "add", "delete", "sweep"]), st.integers(0, 1), st.integers(0, 9)),
        min_size=5,
        max_size=20,
    )
)
def test_chains_stay_whole_whatever_two_servers_add_delete_and_sweep(
    databases: tuple[StateDatabase, StateDatabase], steps: list[tuple[str, int, int]]
) -> None:
    tenant = uuid.uuid4().hex
    chains: dict[str, list[str]] = {}  # of what is not deleted, the youngest first
    for step, place, which in steps:
        database = databases[place]
        chosen = list(chains)[-1 - which] if which < len(chains) else None
        if step == "add":
            name = add(database, tenant, chosen)
            chains[name] = [name, *(chains[chosen] if chosen else ())]
        elif step == "delete" and chosen is not None:
            database.transact(lambda entries, name=chosen: entries.delete(name, tenant))
            del chains[chosen]
        elif step == "sweep":
            sweep(database)

        def read(entries: Entries) -> dict[str, list[str]]:
            readable = [name for name in chains if entries.find(name, tenant)]
            return {name: [entry.id for entry in entries.chain(name)] for name in readable}

        assert database.transact(read) == chains
    every = {name for chain in chains.values() for name in chain}
    for name in chains:
        databases[0].transact(lambda entries, name=name: entries.delete(name, tenant))
    sweep(databases[1])
    left = databases[0].transact(lambda entries: entries.items_of(every))
    assert not any(items.inputs for items in left.values())


def test_a_response_that_continues_one_that_is_gone_is_refused(
    databases: tuple[StateDatabase, StateDatabase],
) -> None:
    def insert(entries: Entries) -> None:
        with pytest.raises(IntegrityError):
            entries.insert(f"resp_{'1' * 32}", "me", {}, previous=f"resp_{'0' * 32}")

    databases[0].transact(insert)


def test_an_open_entry_is_lost_unless_its_server_extends_it(databases: tuple[StateDatabase, StateDatabase]) -> None:
    tenant, name = uuid.uuid4().hex, f"resp_{uuid.uuid4().hex}"
    talk = databases[0].transact(lambda entries: conversations.create(entries, tenant, 1, {}, ()))["id"]

    def begin(entries: Entries) -> None:
        entries.insert(name, tenant, {"id": name}, is_open=True)
        conversations.begin_turn(entries, tenant, talk, name, 1)

    def after(seconds: float, own: tuple[str, ...]) -> Any:
        def work(entries: Entries) -> Any:
            entries._now_s += seconds
            entries.tend(own, NO_LIMITS)
            return entries.find(name, tenant)

        return databases[1].transact(work)

    databases[0].transact(begin)
    assert after(20.0, (name, talk)).is_open
    with pytest.raises(ApiError, match="another response is being generated"):
        databases[1].transact(lambda entries: conversations.begin_turn(entries, tenant, talk, "other", 1))
    assert after(40.0, ()).is_open, "extended before"
    assert not after(200.0, (name, talk)).is_open, "too late"

    def begin_late(entries: Entries) -> Any:
        entries._now_s += 200.0
        return conversations.begin_turn(entries, tenant, talk, "other", 1)

    assert databases[1].transact(begin_late) == ([], None)
    late = databases[0].transact(lambda entries: conversations.end_turn(entries, tenant, talk, name, ()))
    assert not late, "another response has begun meanwhile"


def test_beyond_a_limit_a_key_loses_its_oldest_and_modest_keys_nothing(
    databases: tuple[StateDatabase, StateDatabase],
) -> None:
    database, modest, greedy = databases[0], uuid.uuid4().hex, uuid.uuid4().hex
    names = {modest: [add(database, modest, text="x" * 10_000) for _ in range(2)]}
    names[greedy] = [add(database, greedy, text="x" * 10_000) for _ in range(12)]

    def left(tenant: str) -> list[str]:
        return database.transact(lambda entries: [name for name in names[tenant] if entries.find(name, tenant)])

    for limits, most in (
        (StateLimits(most_bytes_of_tenant=60_000), 5),
        (StateLimits(most_entries_of_tenant=3), 3),
    ):
        sweep(database, limits)
        assert left(modest) == names[modest]
        assert left(greedy) == names[greedy][-most:]


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000)),
    most=st.integers(0, 3000),
    own=st.none() | st.integers(0, 600),
)
def test_excess_makes_all_fit_and_takes_nothing_from_who_holds_an_equal_share(
    sizes: dict[str, int], most: int, own: int | None
) -> None:
    over = excess(sizes, most, own)
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
    tenant = uuid.uuid4().hex
    talk = databases[0].transact(lambda entries: conversations.create(entries, tenant, 1, {}, ()))["id"]
    seen: list[list[str]] = []

    def converse(place: int) -> None:
        for turn in range(5):
            name, database = f"{place}-{turn}", databases[place]
            while True:
                try:
                    items, _ = database.transact(
                        lambda entries, name=name: conversations.begin_turn(entries, tenant, talk, name, 1)
                    )
                    break
                except ApiError:  # locked
                    continue
            seen.append([item["name"] for item in items])
            item = new_item("message", name=name)
            database.transact(
                lambda entries, name=name, item=item: conversations.end_turn(entries, tenant, talk, name, [item])
            )

    clients = [threading.Thread(target=converse, args=(place,)) for place in (0, 1)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert sorted(map(len, seen)) == list(range(10))
    longest = max(seen, key=len)
    assert all(names == longest[: len(names)] for names in seen)
