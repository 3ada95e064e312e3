"""Rows of the stored state: two servers on one database, in any order, and limits."""

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from jinfercept.serve.protocols.openai.response_items import new_item
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
    while database.transact(lambda entries: entries.sweep(limits)):
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
            return {name: [row.id for row in entries.chain(name)] for name in readable}

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


def test_beyond_a_limit_a_key_loses_its_oldest_and_modest_keys_nothing(
    databases: tuple[StateDatabase, StateDatabase],
) -> None:
    database, modest, greedy = databases[0], uuid.uuid4().hex, uuid.uuid4().hex
    names = {modest: [add(database, modest, text="x" * 10_000) for _ in range(2)]}
    names[greedy] = [add(database, greedy, text="x" * 10_000) for _ in range(12)]

    def left(tenant: str) -> list[str]:
        return database.transact(lambda entries: [name for name in names[tenant] if entries.find(name, tenant)])

    sweep(database, StateLimits(most_bytes_of_tenant=60_000))
    assert left(modest) == names[modest]
    assert left(greedy) == names[greedy][-5:]


def test_a_sweep_takes_a_bounded_number_from_a_key_beyond_its_limit(
    databases: tuple[StateDatabase, StateDatabase],
) -> None:
    names, tenant = sorted(f"resp_{uuid.uuid4().hex}" for _ in range(1000)), uuid.uuid4().hex

    def insert(entries: Entries) -> None:
        for name in names:
            entries.insert(name, tenant, {})

    databases[0].transact(insert)
    for left in (500, 97):
        databases[0].transact(lambda entries: entries.sweep(StateLimits(most_bytes_of_tenant=100_000)))
        assert (
            databases[0].transact(lambda entries: [name for name in names if entries.find(name, tenant)])
            == names[-left:]
        )


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
