"""`python -m studies agents`: contenders in cells, who wins, and ratios to `lru_host` and to the bound."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.agent_sessions import ScriptedSession
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import Report, SimulatedLoad, SweepRun
from jinfercept.sim.trace_files import load_sessions
from studies.__main__ import main
from studies.agents.cells import BASELINE, BOUNDS, CONTENDERS, OURS, AgentCell, AgentModel, play
from studies.agents.command import StudyAgents
from studies.agents.regimes import ratio_text
from studies.agents.report import answer
from studies.answer import FinishedRuns, StudyEffort

SMALL = AgentModel("small", "roofline-llama-3-8b-h100-attention", 12_800)


class InProcess(StudyEffort):
    """Plays runs here, one after the other."""

    def play(self, runs: Sequence[SweepRun]) -> list[Report]:
        return [run.play(lambda now: None) for run in runs]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    calls = [[1000 + 400 * turn, 4, 1000 + 400 * (turn - 1), 0.5, 0, "tool_use"] for turn in range(6)]
    lines = [json.dumps({"id": f"s{number}", "calls": calls}) for number in range(3)]
    file = tmp_path / "sessions.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("disk", [0.0, 20.0])
def test_a_map_has_a_row_for_each_contender_and_its_ratios(
    disk: float, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.agents.cells.MEAN_CONTEXT", 3_000)
    cell = AgentCell(SMALL, 0.5, 1.0, disk)
    contenders = (OURS[0], BASELINE, BOUNDS[0])
    effort = InProcess(True, 1, 0, Console(quiet=True))
    agent_map = play(effort, load_sessions(trace), [cell], contenders, num_seeds=1, duration_s=10.0)
    study = answer(agent_map)
    assert len(agent_map.rows) == len(contenders)
    page = study.markdown(None)
    assert [contender.title for contender in contenders if f"| {contender.title} " not in page] == []
    assert "small: best mean turn delay" in page
    own, bound = (agent_map.results[cell, contender.title].mean for contender in (OURS[0], BOUNDS[0]))
    assert bound > 0.0
    assert f"{own / bound:.2f} × Bélády's" in page


def test_the_grid_has_every_pool_of_every_model_and_cells_are_chosen_by_their_parts() -> None:
    grid = StudyAgents(full=True).cells()
    assert len(grid) == 3 * 5 * 5
    assert {cell.live for cell in grid} == {4, 8, 13, 19, 38}
    chosen = StudyAgents(model=("70B",), device=("0.1,0.5",), host=("2",)).cells()
    assert [str(cell) for cell in chosen] == [f"70B, 8 × A100, device {device} ×, host 2 ×" for device in (0.1, 0.5)]
    assert {cell.disk for cell in StudyAgents(disk=20.0).cells()} == {20.0}


def test_a_contender_that_does_not_exist_is_refused_before_anything_runs(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agents", "--trace", str(trace), "--contender", "sagas"]) == 2
    assert f"one of {', '.join(contender.title for contender in CONTENDERS)}" in capsys.readouterr().err


def test_finished_runs_are_not_played_again_and_others_are_none_of_them(trace: Path, tmp_path: Path) -> None:
    sessions = load_sessions(trace)
    run, other = (_run(sessions, seed) for seed in (0, 1))
    FinishedRuns(tmp_path / "runs.jsonl").add(run, {"turns": 7})
    FinishedRuns(tmp_path / "runs.jsonl").add(other, {"error": "interrupted"})
    finished = FinishedRuns(tmp_path / "runs.jsonl")
    assert finished.report(_run(load_sessions(trace), 0)) == {"turns": 7}
    assert finished.report(other) is None
    effort = StudyEffort(True, 1, 0, Console(quiet=True), finished=finished)
    assert effort.play([run, run]) == [{"turns": 7}] * 2
    (tmp_path / "runs.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        FinishedRuns(tmp_path / "runs.jsonl")


def _run(sessions: Sequence[ScriptedSession], seed: int) -> SweepRun:
    simulation = Simulation(PROFILES[SMALL.profile], "lru", kv_tokens=SMALL.kv_tokens, max_model_len=SMALL.kv_tokens)
    return SweepRun(simulation, SimulatedLoad("agents", 0.0, seed, SessionLoad(sessions, seed, 1, duration_s=1.0)))


def test_policies_are_compared_under_the_same_order_by_paired_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--regime", "2.5/s", "--seeds", "2", "--duration", "12", "--jobs", "1"]
    assert main(["regimes", *arguments, "--policy", "lru_host"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("small contexts, 2.5/s")]
    assert row.count("1.00 (1.00-1.00)") == 2
    assert main(["regimes", "--regime", "huge"]) == 2


def test_the_interval_of_a_ratio_is_that_of_its_pairs() -> None:
    assert ratio_text([(2.0, 1.0)]) == "2.00"
    assert ratio_text([(1.0, 1.0), (4.0, 1.0), (2.0, 1.0)]) == "2.33 (0.36-11.18)"
