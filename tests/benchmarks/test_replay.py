"""Replays on a tiny real model: the simulator's keys, the same tokens under every policy, and nothing left behind."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.replay import different, random_tokens, replay, resize_host, simulation
from benchmarks.suite.scaled import scaled, scaled_sessions
from jinfercept.errors import ConfigError
from jinfercept.request import Request
from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn, load_sessions
from jinfercept.sim.scripted import SessionLoad, make_request
from jinfercept.sim.workload import Arrival, Script, Segment
from jinfercept.start.start import EngineSetup
from tests.support.tiny_model import tiny_setup

WRITE = random_tokens(128, seed=3)
ARRIVALS = [
    Arrival(
        0.02 * number, Script("chat", 16 + number % 5, (Segment(4, 0.15, 5), Segment(3, 0.1, 6), Segment(4, None, 0)))
    )
    for number in range(16)
]


@pytest.fixture(scope="module")
def setup() -> Iterator[EngineSetup]:
    with closing(tiny_setup(kv_tokens=160, max_model_len=64, profile=None, lazy=False)) as setup:
        yield resize_host(setup, 320)


def requests() -> list[tuple[float, Request]]:
    return [(at_s, make_request(number, script, WRITE)) for number, (at_s, script) in enumerate(ARRIVALS)]


def test_every_policy_gives_the_same_tokens_and_the_simulators_keys(setup: EngineSetup) -> None:
    runs = {policy: replay(setup, policy, requests(), WRITE, 20.0) for policy in ("discard", "swap", "copy_ahead")}
    for policy, run in runs.items():
        simulator = simulation(setup, policy, 20.0, run.report["host_s"])
        simulated = simulator.run(ARRIVALS)
        assert run.report.keys() == simulated.keys()
        assert run.report["unfinished"] == simulated["unfinished"] == 0
        assert different(run.streams, runs["discard"].streams) == []
        assert len(run.streams) == 16
        assert 0 < run.report["host_s"] < 0.1
        assert run.report["step_s"]["measured"] < run.report["simulated_s"]


def test_turns_of_sessions_give_the_same_tokens_and_the_simulators_keys(setup: EngineSetup) -> None:
    turns = (
        ScriptedTurn(16, 4, 0, 0.0, True),
        ScriptedTurn(26, 4, 20, 0.1, False),
        ScriptedTurn(30, 3, 12, 0.05, True),
    )
    load = SessionLoad([ScriptedSession("a", 5, turns)], seed=0, rate=20.0, duration_s=0.3)
    runs = [replay(setup, policy, load, WRITE, 10.0) for policy in ("discard", "copy_ahead")]
    simulated = simulation(setup, "copy_ahead", 10.0, runs[1].report["host_s"]).run(load)
    for run in runs:
        assert run.report.keys() == simulated.keys()
        assert run.report["finished_sessions"] == run.report["sessions"] == simulated["sessions"] > 1
        assert 0 < run.report["turn_delay_s"]["mean"] < 10
        delays = [turn.delay_s for turn in run.turns if turn.finished]
        assert sum(delays) / len(run.streams) == pytest.approx(run.report["turn_delay_s"]["mean"])
    assert len(runs[0].streams) == 3 * simulated["sessions"]
    assert different(*(run.streams for run in runs)) == []


def test_what_a_replay_recomputes_is_what_the_simulator_says(setup: EngineSetup) -> None:
    run = replay(setup, "improved_discard", requests(), WRITE, 20.0)
    simulated = simulation(setup, "improved_discard", 20.0, run.report["host_s"]).run(ARRIVALS)
    assert run.report["recomputed_tokens"] == pytest.approx(simulated["recomputed_tokens"], rel=0.1)


def test_the_host_pool_is_as_large_as_asked(setup: EngineSetup) -> None:
    assert setup.memory_plan.host_tokens == 320
    assert resize_host(setup, 403).memory_plan.host_tokens == 400


def test_what_is_unfinished_is_counted_and_given_up(setup: EngineSetup) -> None:
    slow = Script("chat", 16, (Segment(4, 30.0, 5), Segment(4, None, 0)))
    report = replay(setup, "copy_ahead", [*requests()[:2], (0.05, make_request(99, slow, WRITE))], WRITE, 0.5).report
    assert report["unfinished"] == 1
    assert report["simulated_s"] < 3.0
    assert not setup.runner.kv.host


def test_an_interrupt_leaves_nothing_behind(setup: EngineSetup) -> None:
    def interrupt(now: float, end: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(setup, "copy_ahead", requests(), WRITE, 20.0, interrupt)
    assert not setup.runner.kv.host
    assert len(replay(setup, "copy_ahead", requests()[:2], WRITE, 20.0).streams) == 2


def test_tokens_that_differ_are_named() -> None:
    assert different({"a": [1], "b": [2], "c": [3]}, {"a": [1], "b": [4]}) == ["b"]


def test_whole_prompts_are_refused_where_no_step_holds_them() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        tiny_setup(kv_tokens=160, chunked_prefill=False, max_model_len=120, max_num_batched_tokens=64)


def test_scaling_keeps_at_least_a_token_and_returns_nothing_where_nothing_was_returned() -> None:
    script = Script("math", 40, (Segment(3, 2.0, 0), Segment(100, 5.0, 4), Segment(1, None, 0)))
    [(at_s, small)] = scaled([Arrival(10.0, script)], 0.1, 0.5)
    assert at_s == 5.0
    assert small == Script("math", 4, (Segment(1, 1.0, 0), Segment(10, 2.5, 1), Segment(1, None, 0)))


def test_the_trace_of_agents_ships_and_can_be_scaled() -> None:
    sessions = load_sessions("agents")
    assert len(sessions) == 36
    small = scaled_sessions(sessions, 0.01, 0.1)
    assert max(session.longest for session in small) < 4_100
    assert all(turn.kept < turn.prompt for session in small for turn in session.turns)
