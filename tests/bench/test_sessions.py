"""`bench sessions`: who takes turns when, what a round comes to, and a newcomer beside sessions that pause."""

import asyncio
import json
from pathlib import Path

import pytest

from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import Client, ClientReply, make_target
from jinfercept.bench.session_rounds import Going, Visit, later_turns, rounds, take_turns
from jinfercept.cli.main import main
from jinfercept.sim.workload import Script, Segment
from tests.support.fake_openai import FakeServer, fake_openai

SCRIPT = Script("agent", 10, (Segment(2, 0.05, 4), Segment(2, None, 0)))


def visits(fake: FakeServer, going: Going, number: int = 3, model: str = "good") -> list[Visit]:
    async def go() -> list[Visit]:
        async with Client(make_target(fake.url, None, 60.0)) as client:
            return await take_turns(client, model, Style(), [SCRIPT] * number, going, "0")

    return asyncio.run(go())


def test_sessions_take_turns_one_after_another_and_wait_for_their_tools() -> None:
    with fake_openai() as fake:
        played = visits(fake, Going(False, True))
    assert [(visit.turn, visit.session) for visit in played] == [
        (turn, session) for turn in (1, 2) for session in range(3)
    ]
    assert fake.most == 1
    assert fake.sessions == ["0/0", "0/1", "0/2"] * 2
    assert all(played[n + 3].reply.sent_s >= played[n].reply.end_s + 0.05 for n in range(3))


def test_sessions_at_once_do_not_wait_for_each_other() -> None:
    with fake_openai(meet=3) as fake:
        played = visits(fake, Going(True, False))
    assert fake.most == 3
    assert sorted((visit.turn, visit.session) for visit in played) == [
        (turn, session) for turn in (1, 2) for session in range(3)
    ]
    assert fake.sessions == [""] * 6


def test_a_session_that_fails_takes_no_further_turns() -> None:
    with fake_openai() as fake:
        played = visits(fake, Going(False, False), model="broken")
    assert [(visit.turn, visit.reply.error) for visit in played] == [(1, "HTTP 500")] * 3
    [only] = rounds(played, concurrent=False)
    assert (only["requests"], only["failed"], only["request_s"], only["cached_share"]) == (3, 3, None, None)
    assert later_turns([only]) is None


def answered(sent_s: float, end_s: float, cached: int) -> ClientReply:
    return ClientReply(sent_s, [sent_s + 0.5], end_s, prompt_tokens=100, completion_tokens=1, cached_tokens=cached)


def test_a_round_is_as_long_as_its_requests_or_from_its_start_to_its_end() -> None:
    history = [
        Visit(0, 1, answered(0, 2, 0)),
        Visit(1, 1, answered(5, 6, 0)),
        Visit(0, 2, answered(7, 8, 80)),
        Visit(1, 2, answered(10, 13, 90)),
        Visit(0, 3, answered(14, 15, 100)),
    ]
    first, second, third = rounds(history, concurrent=False)
    assert (first["round_s"], second["round_s"], third["round_s"]) == (3, 4, 1)
    assert (second["request_s"], second["ttft_s"], second["cached_share"]) == (2, 0.5, 0.85)
    assert [row["round_s"] for row in rounds(history, concurrent=True)] == [6, 6, 1]
    later = later_turns([first, second, third])
    assert later is not None
    assert (later["round_s"], later["slowest_round_s"], later["cached_share"]) == (2.5, 4, 0.9)


def test_the_command_shows_rounds_growth_and_a_newcomers_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    with fake_openai() as fake:
        shape = [
            "--turns",
            "3",
            "--prompt-tokens",
            "20",
            "--new-tokens",
            "2",
            "--tool-tokens",
            "3",
            "--sessions",
            "1,2",
        ]
        assert main(["bench", "sessions", "--base-url", fake.url, *shape, "--newcomer", "--json", str(out)]) == 0
    alone, paired = json.loads(out.read_text())
    assert (alone["sessions"], paired["sessions"], len(alone["rows"]), len(paired["rows"])) == (1, 2, 3, 6)
    assert [turn["cached_tokens"] for turn in alone["rounds"]] == [1, 21, 28]
    assert alone["later_turns"]["cached_share"] == (21 + 28) / (28 + 35)
    assert (len(paired["newcomer"]["idle_s"]), len(paired["newcomer"]["ttft_s"])) == (4, 3)
    assert paired["newcomer"]["ratio"] > 0
    assert "× fewest" in (shown := capsys.readouterr().out)
    assert "newcomer's" in shown


def test_newcomers_need_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sessions", "--base-url", "http://127.0.0.1:9", "--newcomer", "--concurrent"]) == 2
    assert "--newcomer excludes --concurrent" in capsys.readouterr().err


def test_a_failure_is_shown_and_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai() as fake:
        assert main(["bench", "sessions", "--base-url", fake.url, "--model", "busy", "--sessions", "2"]) == 1
    assert "HTTP 429: come again" in capsys.readouterr().out
