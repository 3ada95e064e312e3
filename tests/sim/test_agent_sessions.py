"""Sessions of agents: how traces are read, and what their clients send and measure."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from jinfercept.chat.detector import ScriptedDetector
from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jinfercept.sim import scripted
from jinfercept.sim.agent_sessions import TOOL, ScriptedSession, ScriptedTurn, SubAgent, load_sessions
from jinfercept.sim.scripted import SessionClients, SessionLoad, session_tokens
from jinfercept.sim.simulation import Simulation
from tests.sim.test_simulation import PROFILE

LINES = [
    {
        "id": "a",
        "tools": 40,
        "system": 20,
        "calls": [[100, 10, 0, 0.0, 1, "tool_use"], [150, 5, 64, 2.5, 0, "end_turn"]],
    },
    {"id": "a.0", "parent": "a", "tools": 10, "system": 5, "calls": [[80, 3, 0, 0.0, 1, ""], [90, 3, 0, 1.0, 1, ""]]},
    {
        "id": "b",
        "tools": 40,
        "system": 20,
        "calls": [[200, 7, 0, 0.0, 1, ""], [90, 7, 64, 9, 1, ""], [70, 1, 64, 1, 1, ""]],
    },
]


def trace(folder: Path, *lines: object) -> str:
    path = folder / "agents.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def session(*pauses_s: float, prompt: int = 20, sub_agents: tuple[SubAgent, ...] = ()) -> ScriptedSession:
    turns = [ScriptedTurn(prompt, 4, 0, 0.0, True)]
    for pause_s in pauses_s:
        kept = turns[-1].prompt + 4
        turns.append(ScriptedTurn(kept + 6, 4, kept, pause_s, True))
    return ScriptedSession("a", 8, tuple(turns), sub_agents)


def simulation(**options: object) -> Simulation:
    defaults = {"duration_s": 20.0, "kv_tokens": 160, "host_tokens": 400, "page_size": 4, "max_model_len": 64}
    defaults |= {"prefix_caching": True, "drain_s": 0.0}
    return Simulation(PROFILE, **({"policy": "lru"} | defaults | options))  # pyright: ignore[reportArgumentType]


def test_a_line_is_a_session_with_its_sub_agents_and_what_its_prompts_have_in_common(tmp_path: Path) -> None:
    first, second = load_sessions(trace(tmp_path, *LINES))
    assert first.turns == (ScriptedTurn(100, 10, 0, 0.0, True), ScriptedTurn(150, 5, 110, 2.5, False))
    assert [sub.session.name for sub in first.sub_agents] == ["a.0"]
    assert first.longest == 155
    assert first.shared == 60
    assert [turn.kept for turn in second.turns] == [0, 64, 64]  # the second one's history is shorter: it was compacted


def test_a_trace_of_claude_code_is_read_with_failed_streams_and_sub_agents(tmp_path: Path) -> None:
    def asked(t: float, blocks: list[int], **values: object) -> dict[str, object]:
        return {
            "t": t,
            "type": "s",
            "in": 64 * len(blocks) + 9,
            "out": 5,
            "hash_ids": [*blocks, -t],
            "stop": "tool_use",
        } | values

    again = asked(4.0, [1, 2, 3], api_time=1.0, think_time=2.0, out=7)
    subagent = {"t": 5.0, "type": "subagent", "requests": [asked(0.0, [8]), asked(3.0, [8, 9], think_time=1.5)]}
    requests = [
        asked(0.0, [1, 2], think_time=0.0),
        again,
        again | {"type": "n", "out": 4, "stop": "end_turn"},
        subagent,
    ]
    requests.append(asked(9.0, [1, 2], think_time=3.0))
    entry = {"id": "s", "block_size": 64, "tool_tokens": 20, "system_tokens": 10, "requests": requests}
    (tmp_path / "s.json").write_text(json.dumps(entry, indent=1))
    [read] = load_sessions(tmp_path)
    assert read == load_sessions(tmp_path / "s.json")[0]
    assert read.shared == 30
    assert [(turn.prompt, turn.decode, turn.kept) for turn in read.turns] == [(137, 5, 0), (201, 4, 142), (137, 5, 128)]
    assert [(turn.pause_s, turn.calls) for turn in read.turns] == [(0.0, True), (2.0, False), (3.0, True)]
    [sub] = read.sub_agents
    assert sub.after_turn == 1
    assert [turn.kept for turn in sub.session.turns] == [0, 78]


def test_a_call_may_name_its_tool_and_clients_call_it_by_that_name(tmp_path: Path) -> None:
    calls = [[100, 10, 0, 0.0, 1, "tool_use", "bash"], [150, 5, 64, 2.5, 0, "tool_use"], [200, 5, 64, 2.5, 0, "", ""]]
    [read] = load_sessions(trace(tmp_path, {"id": "a", "calls": calls}))
    assert [turn.tool for turn in read.turns] == ["bash", TOOL, TOOL]
    [request] = SessionClients(SessionLoad([read], seed=0, live=1), session_tokens).due(200.0)
    assert isinstance(request.detector, ScriptedDetector)
    assert [call.name for calls in request.detector.script.values() for call in calls] == ["bash"]


def test_conversations_are_read_from_messages_with_tools_and_delays(tmp_path: Path) -> None:
    def message_of(name: str, role: str, **values: object) -> dict[str, object]:
        return {"conversation_id": name, "role": role} | values

    call = {"id": "1", "function": {"name": "bash", "arguments": "x" * 36}}
    lines = [
        message_of("a", "user", content="u" * 400, system="s" * 80, tools=[]),
        message_of("b", "user", content="v" * 40),
        message_of("a", "assistant", reasoning_content="r" * 40, tool_calls=[call]),
        message_of("a", "tool", tool_results=[{"content": "t" * 180}], delay_seconds=0.25),
        message_of("a", "assistant", content="e" * 20),
        message_of("b", "assistant", content="w" * 8),
    ]
    first, second = load_sessions(trace(tmp_path, *lines))
    assert (first.name, first.shared) == ("a", 20)
    written = 10 + len(json.dumps([call])) // 4
    read = len(json.dumps([{"content": "t" * 180}])) // 4
    assert first.turns == (
        ScriptedTurn(120, written, 0, 0.0, True, "bash"),
        ScriptedTurn(120 + written + read, 5, 120 + written, 0.25, False),
    )
    assert second.turns == (ScriptedTurn(10, 2, 0, 0.0, False),)
    with pytest.raises(ConfigError, match=r"line 1 cannot be read: 'a' is missing; .* a user's first"):
        load_sessions(trace(tmp_path, message_of("a", "assistant", content="x")))
    with pytest.raises(ConfigError, match="line 2 cannot be read: "):
        load_sessions(trace(tmp_path, lines[0], message_of("a", "assistant", tool_calls="bash")))


EDGE = os.environ.get("JINFERCEPT_EDGE_TRACE")
"""A file of MLCommons' agentic edge workload, as messages or in the compact form. It is not part of the project."""


@pytest.mark.skipif(EDGE is None, reason="JINFERCEPT_EDGE_TRACE names no file of MLCommons' edge set")
def test_the_edge_set_is_read_with_its_tools_and_short_pauses() -> None:
    sessions = load_sessions(EDGE or "")
    turns = [turn for session in sessions for turn in session.turns]
    assert (len(sessions), len(turns)) == (20, 1007)
    assert {turn.tool for turn in turns} <= {"bash", TOOL}
    assert median(turn.pause_s for turn in turns) < 0.1
    assert all(session.longest < 32_000 for session in sessions)


def test_more_sessions_that_begin_midway_include_those_of_fewer() -> None:
    def begun(live: int) -> list[tuple[int, int]]:
        sessions = [session(*[1.0] * length) for length in (3, 7, 11, 19)]
        clients = SessionClients(SessionLoad(sessions, seed=3, live=live, midway=True), session_tokens)
        return sorted((int(request.id.split(".")[0]), len(request.prompt_token_ids)) for request in clients.due(200.0))

    assert begun(2) == begun(3)[:2] == begun(4)[:2]
    assert len(begun(4)) == 4


def test_a_trace_of_no_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace(tmp_path, {"model": "x", "tokens": 3})]) == 2
    assert "has no known form of a trace; got keys model, tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "calls": []}, "line 1 cannot be read"),
        ({"id": "a", "calls": [[1, 2]]}, "line 1 cannot be read: not enough values"),
        ({"id": "a", "calls": [[1, 2, 0, -1.0, 0, ""]]}, "line 1 cannot be read: -1.0 is no number from 0 to"),
        ({"id": "a", "parent": "b", "calls": [[1, 2, 0, 0, 0, ""]]}, "parent is missing"),
    ],
)
def test_a_line_that_is_no_session_is_refused(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sessions(trace(tmp_path, line))


def test_a_turn_repeats_the_conversation_as_far_as_it_was_kept() -> None:
    turns = (ScriptedTurn(20, 4, 0, 0, True), ScriptedTurn(30, 4, 24, 1, False), ScriptedTurn(15, 2, 12, 1, False))
    clients = SessionClients(SessionLoad([ScriptedSession("a", 8, turns)], seed=0, live=1), session_tokens)
    prompts = [prompt_of_next(clients, 200.0 + number) for number in range(3)]
    assert [len(prompt) for prompt in prompts] == [20, 30, 15]
    assert len(set(prompts[0][:8])) == 1
    assert prompts[1][:24] == (*prompts[0], 0, 0, 0, 0)  # and what was generated
    assert prompts[2][:12] == prompts[1][:12]
    assert prompts[2][12] != prompts[1][12]
    assert [record.new for record in clients.records] == [12, 6, 3]
    assert clients.ended_sessions == 1


def prompt_of_next(clients: SessionClients, now: float) -> Sequence[int]:
    """The next turn's prompt, after an answer of zeros."""
    [request] = clients.due(now)
    metrics = RequestMetrics(now, now, now, 0.0, 0, 0, 0, 0)
    tokens = [0] * (request.params.max_tokens or 0)
    completion = CompletionOutput(0, "", tokens, "length", None, len(tokens))
    clients.ended(RequestOutput(request.id, None, list(request.prompt_token_ids), [completion], 0, metrics))
    return tuple(request.prompt_token_ids)


def test_a_turn_that_is_not_served_counts_with_its_time_so_far() -> None:
    waiting = simulation(duration_s=1.0, max_num_seqs=1)
    report = waiting.run(SessionLoad([session(0.0, prompt=50)], seed=1, live=8, duration_s=1.0))
    assert report["unfinished"] > 0
    assert report["turn_delay_s"]["p99"] > 0.2
    assert report["longest_wait_s"] == report["turn_delay_s"]["p99"]
    assert report["turn_delay_of_sessions_s"] > 0
    assert 0 < report["unserved_share"] < 1
    assert 0 <= report["within_limits_share"] <= 1


def test_the_time_of_sessions_at_the_door_is_reported_beside_the_delays_of_turns_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scripted, "RETRY_S", 0.5)
    load = SessionLoad([session(0.1, 0.1)], seed=1, live=90, duration_s=8.0, ramp_s=6.0)
    queued, refused, served = (
        simulation(duration_s=8.0, max_num_seqs=1, order="missing_work", overload=overload).run(load)
        for overload in ("queue", "refuse", "serve")
    )
    for report in (queued, refused):
        assert report["turn_delay_s"]["mean"] < report["turn_delay_with_door_s"]["mean"]
        assert report["turn_delay_s"]["mean"] < served["turn_delay_s"]["mean"]
        assert report["door_s"]["mean"] > served["door_s"]["mean"] == 0.0
        assert report["completed_per_s"] > 0.9 * served["completed_per_s"]
    assert queued["within_limits_share"] > served["within_limits_share"]


def test_an_oracle_knows_a_call_until_the_policy_has_seen_that_it_returned() -> None:
    load = SessionLoad([session(1.0, 2.0)], seed=0, live=2, duration_s=20.0)
    report = simulation(policy="copy_ahead", estimator="oracle").run(load)
    assert report["finished_sessions"] > 0
    assert report["unfinished"] <= 2


def test_a_sub_agent_runs_beside_its_parent_and_ends_before_another_session_begins() -> None:
    parent = session(3.0, sub_agents=(SubAgent(0, session()),))
    clients = SessionClients(SessionLoad([parent], seed=0, live=1, duration_s=900.0), session_tokens)
    prompt_of_next(clients, 200.0)
    prompt_of_next(clients, 200.0)
    assert clients.next_s == 203.0
    prompt_of_next(clients, 203.0)
    assert [(record.session, record.turn) for record in clients.records] == [(0, 0), (1, 0), (0, 1)]
    assert clients.ended_sessions == 2
    assert clients.begun == 3


def test_the_pauses_of_tools_and_of_people_are_different_calls() -> None:
    turns = (ScriptedTurn(20, 4, 0, 0.0, False), ScriptedTurn(30, 4, 24, 9.0, True))
    [read_by_person] = SessionClients(
        SessionLoad([ScriptedSession("a", 8, turns)], seed=0, live=1), session_tokens
    ).due(200.0)
    [ends_in_call] = SessionClients(SessionLoad([session(1.0)], seed=0, live=1), session_tokens).due(200.0)
    assert read_by_person.detector is None
    assert isinstance(ends_in_call.detector, ScriptedDetector)
    assert [calls[0].by_caller for calls in ends_in_call.detector.script.values()] == [True]


def test_simulate_plays_a_trace_of_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path, *LINES)
    flags = ["--live", "2", "--duration", "5", "--kv-tokens", "400", "--policy", "lru_host", "--jobs", "1"]
    assert main(["simulate", "--trace", path, *flags, "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr()
    assert "delay s" in shown.out
    assert "2 live" in shown.out
    [report] = json.loads((tmp_path / "out.json").read_text())
    assert report["turn_delay_s"]["p90"] > 0
    assert main(["simulate", "--trace", path, *flags, "--max-model-len", "100"]) == 2
    assert "no session of the trace fits" in capsys.readouterr().err
    assert main(["simulate", "--live", "2"]) == 2
    assert "--live needs a trace of sessions" in capsys.readouterr().err
