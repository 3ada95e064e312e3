"""Agents within limits: the search, its command, and how the answers of seeds are compared."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jinfercept.cli.main import main
from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.reports import paired_ratio, ranking
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import INTERRUPTED, Report, SimulatedLoad, SweepRun
from jinfercept.sim.within_limits import KEPT_SHARE, MOST_LIVE, most_kept, most_within_limits, next_live, search_report
from tests.sim.test_agent_sessions import session


def run_of(trial: int, live: int) -> SweepRun:
    simulation = Simulation(PROFILES["paper-gptj-6b-a100"], "lru")
    return SweepRun(simulation, SimulatedLoad("agents", 0.0, trial, SessionLoad([session()], trial, live)))


@pytest.mark.parametrize("most", [0, 1, 5, 8, 9, 11, 40])
def test_the_search_ends_at_the_most_sessions_that_keep_the_limits(most: int) -> None:
    steps = list[int]()

    def play(runs: Sequence[SweepRun]) -> list[Report]:
        steps.append(len(runs))
        return [{"within_limits_share": KEPT_SHARE if len(run.load.arrivals) <= most else 0.9} for run in runs]

    tried = most_within_limits([1, 2], run_of, play)
    assert [most_kept(shares) for shares in tried.values()] == [most, most]
    assert set(steps) == {2}
    assert len(steps) <= 10


def test_a_share_above_one_that_failed_counts_and_the_search_is_bounded() -> None:
    assert next_live({8: 0.9, 12: 0.97, 18: 0.5}) == 15
    assert most_kept({8: 0.9, 12: 0.97, 18: 0.5}) == 12
    assert next_live({MOST_LIVE: 1.0}) is None
    assert next_live({1: 0.2}) is None


@pytest.mark.parametrize(("error", "raised"), [("ValueError: no", ConfigError), (INTERRUPTED, KeyboardInterrupt)])
def test_a_run_that_failed_ends_the_search(error: str, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        most_within_limits([1], run_of, lambda runs: [{"error": error} for _ in runs])


def test_a_report_has_the_spread_over_seeds_and_all_that_was_tried() -> None:
    report = search_report({0: {8: 0.97, 12: 0.9}, 1: {8: 0.9, 4: 1.0}})
    assert report["agents"] == {"mean": 6.0, "least": 4, "most": 8}
    assert report["seeds"]["1"] == {"agents": 4, "within_limits_share": {"4": 1.0, "8": 0.9}}


def test_what_the_seeds_cannot_tell_apart_is_said() -> None:
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 1.1, 1: 1.9, 2: 3.2}, "c": {0: 2.0, 1: 4.1, 2: 5.9}}
    lines = ranking(values)
    assert [line.split(":")[0] for line in lines] == ["a", "b", "c"]
    assert ["not to be told apart" in line for line in lines] == [False, True, False]
    assert ranking(values, larger=True)[0].startswith("c: 4")
    assert "too few seeds" in ranking({"a": {0: 1.0}, "b": {0: 2.0}})[1]
    assert paired_ratio([(1.0, 1.0)]) is None


def trace(folder: Path) -> str:
    calls = [[1000 + 60 * turn, 20, 940 + 60 * turn if turn else 0, 1.0, 0, "tool_use", "bash"] for turn in range(16)]
    path = folder / "sessions.jsonl"
    path.write_text("".join(f"{json.dumps({'id': f's{number}', 'calls': calls})}\n" for number in range(3)))
    return str(path)


def test_the_command_prints_the_agents_of_every_policy_and_order_with_their_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--agents-within-limits", "--trace", trace(tmp_path), "--kv-tokens", "3000"]
    arguments += ["--host-tokens", "0"]
    arguments += ["--profile", "roofline-llama-13b-a100", "--duration", "12", "--seed", "0,1", "--jobs", "1"]
    arguments += ["--policy", "lru_host", "--order", "fcfs,missing_work", "--json", str(tmp_path / "out.json")]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "lru_host, missing_work" in shown.out
    assert "agents within limits, the most first" in shown.out
    assert "8 live seed 1" in shown.err
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert (first["order"], second["order"]) == ("fcfs", "missing_work")
    assert 0 < first["agents"]["least"] <= first["agents"]["most"]
    assert first["limits"] == {"first_token_s": 2.0, "per_token_s": pytest.approx(1 / 30), "new_token_s": 1e-4}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--agents-within-limits needs a trace of sessions; got --workload mixed"),
        (["--trace", "agents", "--decisions", "x"], "--agents-within-limits and --decisions cannot be combined"),
        (
            ["--trace", "agents", "--warm-up", "2000"],
            "nothing that arrives would count; got --warm-up 2000, --duration 1200",
        ),
        (["--trace", "agents", "--kv-tokens", "1000"], "no session of the trace fits"),
        (
            ["--trace", "agents", "--duration", "nan"],
            "--duration is too small; got nan; fix: at least 0",
        ),
        (["--trace", "agents", "--duration", "0.1", "--jobs", "1"], "no turn was counted; got copy_ahead"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--agents-within-limits", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_warm_up_as_long_as_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--duration", "20", "--warm-up", "30"]) == 2
    assert "nothing that arrives would count; got --warm-up 30, --duration 20" in capsys.readouterr().err


def test_simulate_ranks_policies_by_turn_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--trace", trace(tmp_path), "--live", "4", "--kv-tokens", "3000", "--duration", "8"]
    assert main([*arguments, "--policy", "lru_host,lru", "--seed", "0,1", "--jobs", "1"]) == 0
    ranked = capsys.readouterr().out.split("mean turn delay in s, the least first")[1]
    assert "×" in ranked
