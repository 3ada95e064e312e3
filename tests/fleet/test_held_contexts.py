"""What a replica reports to routers, and the last event of a stream that is lost."""

import json

import pytest

from jinfercept.fleet.relay import last_event, lost_error
from jinfercept.fleet.replica_app import REPORTED_S, HeldContexts


def test_the_contexts_used_last_are_held_and_lost_ones_are_reported_as_such() -> None:
    now = 0.0
    contexts = HeldContexts(100, lambda: now)
    contexts.use("a", (b"1", b"one"), 60)
    now = 1.0
    contexts.use("a", (b"2",), 30)
    assert set(contexts.report()) == {("a", b"1", 60), ("a", b"one", 60), ("a", b"2", 30)}
    contexts.use("b", (b"3",), 40)  # 130 tokens: the oldest goes
    assert ("a", b"1", 0) in contexts.report()
    assert ("b", b"3", 40) in contexts.report()
    now = 1.5 + REPORTED_S
    assert contexts.report() == []
    assert ("a", b"2", 30) in contexts.report(everything=True)
    contexts.use("a", (b"1",), 50)
    assert ("a", b"1", 50) in contexts.report()
    assert ("a", b"1", 0) not in contexts.report(everything=True)


@pytest.mark.parametrize(
    ("path", "name", "number"),
    [("/v1/messages", "error", None), ("/v1/responses", "error", 8), ("/v1/completions", "", None)],
)
def test_a_lost_stream_ends_in_the_dialect_of_its_route(path: str, name: str, number: int | None) -> None:
    last = b'event: x\ndata: {"type":"x","sequence_number":6}\n\nevent: x\ndata: {"type":"x","sequence_number":7}\n\n'
    lines = last_event(lost_error(), path, last).decode().splitlines()
    assert lines[0].startswith(f"event: {name}" if name else "data: ")
    data = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert data.get("sequence_number") == number
    assert "replica" in data.get("message", "") or "replica" in data["error"]["message"]
