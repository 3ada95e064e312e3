"""The soak: a short one on a real server loses nothing, and what a server can do wrong is counted as what it is."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.soak.__main__ import main, table, verdict
from tests.soak.client import CHAT, Ask, Got, Said, send
from tests.soak.rounds import is_tied
from tests.soak.tally import Tally
from tests.soak.visits import same
from tests.soak.watch import Held

IDLE = Held(requests=0, pages=0, tasks=3, threads=13, files=24)


WORDS = ["so0 ", "so1 ", "so2 "]
WHOLE = b"".join(
    b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()
    for choice in (*({"delta": {"content": word}} for word in WORDS), {"delta": {}, "finish_reason": "length"})
)
END = b"data: [DONE]\n\n"
ANSWERS: dict[str, tuple[int, bytes]] = {
    "good": (200, WHOLE + END),
    "busy": (429, b'{"error": {"message": "come again"}}'),
    "broken": (500, b"<html>no"),
    "stopped": (200, WHOLE[:40]),
    "odd": (200, b"data: {no\n\n" + WHOLE + END),
    "list": (200, b"data: [1]\n\n" + WHOLE + END),
    "failing": (200, b'data: {"error": {"message": "it broke"}}\n\n' + WHOLE + END),
}


async def answers(request: httpx2.Request) -> httpx2.Response:
    """Of a server that does as the request's model says."""
    match json.loads(request.content)["model"]:
        case "silent":
            await asyncio.Event().wait()
        case "gone":
            raise httpx2.RemoteProtocolError("gone")
        case "cut":
            return httpx2.Response(200, content=cut())
        case name:
            status, content = ANSWERS[name]
            return httpx2.Response(status, content=content)
    raise AssertionError


async def cut() -> AsyncIterator[bytes]:
    yield WHOLE[:60]
    raise httpx2.RemoteProtocolError("cut")


def got_of(model: str, *, stream: bool = True, patience_s: float = 10.0, leave_s: float | None = None) -> Got:
    async def go() -> Got:
        body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": stream}
        async with httpx2.AsyncClient(base_url="http://fake", transport=httpx2.MockTransport(answers)) as http:
            return await send(http, Ask(CHAT, body, leave_s=leave_s), patience_s)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("model", "end"),
    [("busy", "refused"), *((name, "lost") for name in ("broken", "gone", "cut", "stopped", "odd", "list", "failing"))],
)
def test_what_a_server_must_not_do_is_lost(model: str, end: str) -> None:
    assert got_of(model).end == end


def test_a_server_that_says_nothing_hangs_unless_its_client_left_before() -> None:
    assert got_of("silent", patience_s=0.1).end == "hung"
    assert got_of("silent", stream=False, patience_s=0.1).end == "hung"
    assert got_of("silent", leave_s=0.1).end == "left"


def test_only_nonsense_and_conversations_that_are_too_long_may_be_refused() -> None:
    tally = Tally()
    tally.note("nonsense", Got("refused", "HTTP 400"))
    tally.note("session", Got("refused", "HTTP 400: context_length_exceeded"))
    assert tally.clean
    tally.note("chat", Got("refused", "HTTP 400"))
    tally.note("chat", Got("hung"))
    assert (tally.total("lost"), tally.total("hung"), tally.clean) == (1, 1, False)
    assert "lost, chat: HTTP 400" in tally.failures


def test_what_is_held_after_all_was_answered_is_leaked_and_so_is_what_grows() -> None:
    tally = Tally()
    for holding in (IDLE, IDLE._replace(threads=16, files=26), IDLE._replace(threads=17, files=27)):
        tally.settle(holding)
    tally.check_growth()
    assert tally.clean
    tally.settle(IDLE._replace(files=40))
    tally.check_growth()
    assert tally.failures == ["leaked, server: files grew from 26 to 40"]
    tally.settle(IDLE._replace(pages=2))
    assert tally.total("leaked") == 2
    assert "server" in str([*table(tally).columns[0].cells])
    assert verdict(tally).startswith("0 lost, 0 hung, 2 leaked, 0 wrong; ")


def test_tokens_that_differ_are_wrong_unless_two_were_as_good_as_equal() -> None:
    def best(gap: float) -> dict[str, list[dict[str, float]]]:
        return {"top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0 - gap}]}

    alone = Said(token_ids=[1, 2, 3], logprobs=[best(0.5), best(1e-6), best(0.5)])
    assert same(Said(token_ids=[1, 2, 3]), alone)
    for other, tied in (([1, 9, 3], True), ([1, 2, 9], False), ([9, 2, 3], False), ([1, 2], False)):
        assert not same(Said(token_ids=other), alone)
        assert is_tied(Said(token_ids=other), alone) == tied
    called = Said(calls={0: {"id": "a", "name": "price", "arguments": "{}"}})
    assert same(called, Said(calls={0: {"id": "b", "name": "price", "arguments": "{}"}}))
    assert not same(called, Said(calls={0: {"id": "a", "name": "price", "arguments": '{"item": 1}'}}))


@pytest.mark.slow
def test_a_short_soak_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--minutes", "0.05", "--clients", "5", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [report[name] for name in ("lost", "hung", "leaked", "wrong")] == [0, 0, 0, 0]
    assert sum(kind["requests"] for kind in report["kinds"].values()) > 10
    assert len(report["held"]) == 2
    assert "0 lost, 0 hung, 0 leaked, 0 wrong" in capsys.readouterr().out
