"""Replays on a tiny real model: the simulator's keys, the same tokens under every policy, and nothing left behind."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from jinfercept.bench.replay import at_speed_of, different, replay, resize_host, simulation
from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.request import Request
from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.scripted import make_request, random_tokens
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.workload import Script, Segment
from jinfercept.startup.start import EngineSetup
from tests.support.tiny_model import GOLDEN, tiny_setup

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
        assert run.report.keys() == simulated.keys() == at_speed_of(run.report, simulator).run(ARRIVALS).keys()
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


FLAGS = (
    "--dtype",
    "float32",
    "--page-size",
    "4",
    "--kv-tokens",
    "256",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
)


@pytest.mark.slow
def test_the_command_compares_policies_and_simulations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "replay.json"
    load = (
        "--rate",
        "2",
        "--duration",
        "20",
        "--scale-tokens",
        "0.03",
        "--scale-time",
        "0.02",
        "--simulate",
        "--json",
        str(out),
    )
    status = main(["bench", "replay", str(GOLDEN / "llama_gqa"), "--policy", "lru,swap", *load, *FLAGS, "32"])
    shown = capsys.readouterr().out
    assert status == 0
    assert "by latency, simulated" in shown
    reports = json.loads(out.read_text())
    assert [report["policy"] for report in reports] == ["lru", "swap"]
    assert reports[0]["compared"].keys() == {"simulated", "at its speed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "hope"], "no such policy"),
        (["--rate", "0"], "rate of arrivals is out of range"),
        (["--rate", "0.001", "--duration", "1"], "no request arrives"),
        (["--scale-time", "-1"], "--scale-time is out of range"),
        (["--host-tokens", "-1"], "--host-tokens is too small"),
        (["--json", "/nowhere/at/all.json"], "--json cannot be written"),
        (["--chunked-prefill", "--trace", "/nowhere.jsonl"], "the trace cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "replay", "no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_whole_prompts_are_refused_where_no_step_holds_them() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        tiny_setup(kv_tokens=160, chunked_prefill=False, max_model_len=120, max_num_batched_tokens=64)
