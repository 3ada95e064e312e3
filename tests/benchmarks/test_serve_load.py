"""`bench serve` against a server without a model: loads, sessions that grow, numbers of a report, errors that are rows."""

import json
from pathlib import Path
from random import Random

import pytest

from benchmarks.__main__ import main
from benchmarks.serve_load import ClientLoad, LoadRun, run_load
from benchmarks.serve_report import remarks, report
from jinfercept.bench.client_report import spread
from jinfercept.bench.conversations import Style
from jinfercept.bench.openai_client import make_target
from jinfercept.sim.workload import Script, Segment
from tests.support.fake_openai import FakeServer, fake_openai

AGENT = Script("agent", 20, (Segment(3, 0.01, 5), Segment(2, 0.01, 5), Segment(1, None, 0)))
SHARING = Style(system_tokens=7)
SMALL = ["--prompt-tokens", "9", "--turns", "2", "--new-tokens", "3", "--tool-tokens", "4", "--tool-seconds", "0"]


def play(fake: FakeServer, load: ClientLoad, number: int = 6, model: str = "good", style: Style = SHARING) -> LoadRun:
    return run_load(make_target(fake.url, None, 60.0), model, style, [AGENT] * number, load, "0")


def test_so_many_clients_run_at_a_time_and_a_session_is_one_request_after_another() -> None:
    with fake_openai(meet=2) as fake:
        run = play(fake, ClientLoad(None, 2))
    assert fake.most == 2
    assert [len(session.replies) for session in run.sessions] == [3] * 6
    first = run.sessions[0]
    assert all(
        before.end_s + 0.01 <= after.sent_s for before, after in zip(first.replies, first.replies[1:], strict=False)
    )
    assert 0.02 <= first.tool_s <= first.ended_s - first.began_s <= run.seconds


def test_sessions_arrive_as_a_poisson_process_that_the_seed_decides_and_wait_for_nobody() -> None:
    times = ClientLoad(4.0, None).arrivals(4000, "0")
    assert (
        times == sorted(times) == ClientLoad(4.0, None).arrivals(4000, "0") != ClientLoad(4.0, None).arrivals(4000, "1")
    )
    assert times[-1] == pytest.approx(1000, rel=0.05)
    with fake_openai(meet=6) as fake:
        play(fake, ClientLoad(1000.0, None))
    assert fake.most == 6


def test_a_session_grows_by_answers_and_results_and_shares_only_its_system_prompt() -> None:
    with fake_openai() as fake:
        run = play(fake, ClientLoad(None, 1), number=2)
    first, second, third = (body["messages"] for body in fake.bodies[:3])
    assert [message["role"] for message in third] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert (first, second) == (third[:2], third[:4])
    assert third[2]["content"] == "so0 so1 so2 "
    assert [len(message["content"].split()) for message in third] == [7, 20, 3, 5, 2, 5]
    other = fake.bodies[3]["messages"]
    assert (other[0] == first[0], other[1] == first[1]) == (True, False)
    measured = report("a", "good", ClientLoad(None, 1), 0, run)
    tokens = [(29, 0), (39, 29), (48, 39), (29, 9), (39, 29), (48, 39)]  # two sessions, words and roles
    assert [(row["prompt_tokens"], row["cached_tokens"]) for row in measured["rows"]] == tokens
    assert measured["cached_share"] == sum(cached for _, cached in tokens) / sum(prompt for prompt, _ in tokens)
    assert measured["completion_tokens"] == 12


def test_token_ids_grow_by_the_tokens_that_the_server_has_generated() -> None:
    with fake_openai() as fake:
        play(fake, ClientLoad(None, 1), number=1, style=Style(vocabulary=100))
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert (len(first), len(second), len(third)) == (20, 28, 35)
    assert second[:23] == [*first, 0, 1, 2]


def test_nothing_is_lost_when_servers_fail() -> None:
    with fake_openai() as fake:
        run = play(fake, ClientLoad(None, 2), model="cut")
    measured = report("a", "cut", ClientLoad(None, 2), 0, run)
    assert (measured["sessions_completed"], measured["requests"], measured["requests_completed"]) == (0, 6, 0)
    assert measured["errors"] == {"disconnected": 6}
    assert (measured["ttft_s"], measured["session_s"], measured["prompt_tokens"]) == (None, None, None)
    assert {row["error"] for row in measured["rows"]} == {"disconnected"}


def test_percentiles_are_of_what_there_is() -> None:
    assert spread([3.0, None, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0}
    assert spread([None]) is None


def test_a_client_that_is_busy_says_that_it_may_be_what_was_measured() -> None:
    with fake_openai() as fake:
        measured = report("a", "good", ClientLoad(None, 1), 0, play(fake, ClientLoad(None, 1), number=1))
    assert remarks([measured | {"client_cpu_share": 0.1}]) == []
    [remark] = remarks([measured | {"client_cpu_share": 0.9}])
    assert "90% of a core" in remark


def test_the_command_compares_servers_under_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    with fake_openai() as ours, fake_openai() as theirs:
        urls = ["--base-url", f"ours={ours.url}", "--base-url", f"theirs={theirs.url}/v1"]
        load = ["--request-rate", "500", "--concurrency", "2", "--sessions", "3", "--seed", "0,1"]
        assert main(["load", *urls, *load, *SMALL, "--json", str(out), "--plot", str(picture)]) == 0
    reports = json.loads(out.read_text())
    assert len(reports) == 2 * 2 * 2
    assert {(row["server"], row["sessions_completed"], row["requests"]) for row in reports} == {
        ("ours", 3, 6),
        ("theirs", 3, 6),
    }
    assert "500/s" in (shown := capsys.readouterr().out)
    assert "2 clients" in shown
    assert picture.stat().st_size > 1000
    assert sorted(map(json.dumps, ours.bodies)) == sorted(map(json.dumps, theirs.bodies))


def test_a_trace_is_played_as_it_says(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    turn = {"decode": 2, "call_s": 0.0, "returned": 3}
    trace.write_text(json.dumps({"kind": "math", "prompt": 5, "segments": [turn, turn]}))
    with fake_openai() as fake:
        assert main(["load", "--base-url", fake.url, "--trace", str(trace), "--sessions", "1"]) == 0
    assert [body["max_tokens"] for body in fake.bodies] == [2, 2, 1]


def test_a_run_without_any_success_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai() as fake:
        flags = ["--base-url", fake.url, "--model", "busy", "--sessions", "2"]
        assert main(["load", *flags, *SMALL]) == 1
    printed = capsys.readouterr()
    assert "2 × HTTP 429" in printed.out
    assert printed.err.count("HTTP 429: come again") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "got neither"),
        (["tiny", "--base-url", "http://127.0.0.1:9"], "got both"),
        (["--base-url", "http://127.0.0.1:9", "--kv-tokens", "64"], "got --kv-tokens"),
        (["--base-url", "http://a", "--base-url", "http://a/v1"], "the same name"),
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9 does not answer"),
        (["--base-url", "http://a", "--request-rate", "0"], "--request-rate is out of range"),
        (["--base-url", "http://a", "--concurrency", "0"], "--concurrency is too small"),
        (["--base-url", "http://a", "--turns", "0"], "--turns is too small"),
        (["--base-url", "http://a", "--token-ids", "0"], "--token-ids is too small"),
        (["--base-url", "http://a", "--offline"], "give MODEL"),
        (["tiny", "--offline", "--sessions", "3"], "got --sessions"),
        (["tiny", "--offline", "--concurrency", "1,2"], "takes one --concurrency"),
        (["--base-url", "http://a", "--plot", "a.txt"], "unknown kind of picture"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_asked(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_same_seed_draws_the_same_scripts() -> None:
    from jinfercept.bench.session_shape import SessionShape, tool_times

    shape = SessionShape(3, 10, 4, 5, tool_times("lognormal:1,0.5"))
    assert shape.script(Random(1)) == shape.script(Random(1)) != shape.script(Random(2))
    assert [segment.decode for segment in shape.script(Random(1)).segments] == [5, 5, 5]
