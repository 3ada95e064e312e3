"""Replays on a tiny real model: the simulator's keys, the same tokens under every policy, and nothing left behind."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.replay import different, random_tokens, replay, resize_host, simulation
from jinfercept.errors import ConfigError
from jinfercept.request import Request
from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn
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


def test_an_interrupt_leaves_nothing_behind(setup: EngineSetup) -> None:
    def interrupt(number: int, place: int, count: int) -> tuple[int, ...]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(setup, "copy_ahead", requests(), interrupt, 20.0)
    assert not setup.runner.kv.host
    assert len(replay(setup, "copy_ahead", requests()[:2], WRITE, 20.0).streams) == 2


def test_tokens_that_differ_are_named() -> None:
    assert different({"a": [1], "b": [2], "c": [3]}, {"a": [1], "b": [4]}) == ["b"]


def test_whole_prompts_are_refused_where_no_step_holds_them() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        tiny_setup(kv_tokens=160, chunked_prefill=False, max_model_len=120, max_num_batched_tokens=64)
