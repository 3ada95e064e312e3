"""`python -m studies agents`: policies and orders in cells, at given numbers of sessions and at the most within limits;
the search for the latter."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.agent_sessions import ScriptedSession, load_sessions
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import INTERRUPTED, Report, SimulatedLoad, SweepRun
from studies.__main__ import main
from studies.agents.cells import ORDERS, AgentCell, AgentModel, contenders, play
from studies.agents.report import matrix_answer, ratio_text, search_answer
from studies.agents.within_limits import KEPT_SHARE, MOST_LIVE, most_kept, most_within_limits, next_live
from studies.answer import FinishedRuns, StudyEffort
from tests.sim.test_agent_sessions import session

SMALL = AgentModel("small", "roofline-llama-3-8b-h100-attention", 12_800)


class InProcess(StudyEffort):
    """Plays runs here, one after the other."""

    def play(self, runs: Sequence[SweepRun]) -> list[Report]:
        return [run.play() for run in runs]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    calls = [[1000 + 400 * turn, 4, 1000 + 400 * (turn - 1), 0.5, 0, "tool_use"] for turn in range(6)]
    lines = [json.dumps({"id": f"s{number}", "calls": calls}) for number in range(3)]
    file = tmp_path / "sessions.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> AgentModel:
    monkeypatch.setattr("studies.agents.cells.MEAN_CONTEXT", 3_000)
    return SMALL


EFFORT = InProcess(True, 1, 0, Console(quiet=True))


COMPARED = contenders(["lru_host", "copy_ahead+missing_work"])


def test_a_matrix_reports_order_and_policy_apart(small: AgentModel, trace: Path) -> None:
    cell = AgentCell(small, 0.5, 1.0)
    study = matrix_answer(play(EFFORT, load_sessions(trace), [cell], COMPARED, num_seeds=2, duration_s=10.0))
    page = study.markdown(None)
    assert [
        row
        for row in ("| lru_host | fcfs |", "| lru_host | missing_work |", "| copy_ahead | missing_work |")
        if row not in page
    ] == []
    assert "over sessions, s" in page
    assert len(study.rows) == 2 * len(COMPARED)
    kinds = [finding.split(": ")[1].split(", ")[-1] for finding in study.findings]
    assert kinds == ["the order", "the policy", "both", "the best first"]
    assert f"{cell}: mean turn delay, the policy: copy_ahead, missing_work over" in study.findings[1]


def test_a_search_has_the_agents_of_each_cell_with_their_spread_and_a_picture() -> None:
    cells = [AgentCell(SMALL, None, 0.0), AgentCell(SMALL, None, 1.0)]
    tried = {
        (cell, contender, seed): {8: 0.97, 12: 0.9} if seed else {4: 0.97, 8: 0.9}
        for cell in cells
        for contender in COMPARED
        for seed in range(2)
    }
    study = search_answer(tried)
    page = study.markdown(None)
    assert "| policy | order | small, host 0 × | small, host 1 × |" in page
    assert "| lru_host | missing_work | 6 (4–8) | 6 (4–8) |" in page
    assert "1.00 (1.00–1.00)" in study.findings[0]
    assert len(study.panels) == 1


def test_every_policy_is_compared_under_every_order_that_it_admits() -> None:
    titles = [contender.title for contender in contenders(["continuum", "copy_ahead"])]
    assert titles == [
        *(f"continuum, {order}" for order in ("fcfs", "missing_work", "programs")),
        *(f"copy_ahead, {order}" for order in ("fcfs", "missing_work")),
    ]
    [own] = contenders(["examples.rivals.mori:IdlenessTiers+examples.rivals.mars:FeedbackLevels"])
    assert own.title == "IdlenessTiers, FeedbackLevels"
    assert {contender.estimator for contender in contenders() if contender.policy == "belady"} == {"oracle"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contender", "mary"], "no such policy; got mary (did you mean 'mars'?)"),
        (["--contender", "lru+sooner"], f"no such order; got sooner; fix: one of {', '.join(ORDERS)}"),
        (["--within-limits", "--device", "0.3"], "--within-limits cannot be combined with --device or --overload"),
        (["--model", "9B"], "no such model"),
        (["--duration", "0"], "--duration is too small; got 0.0"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_anything_runs(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agents", *flags]) == 2
    assert message in capsys.readouterr().err


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
    arguments = ["--quick", "--regime", "2.5/s, 8,000 tokens, fcfs", "--seeds", "2", "--duration", "12", "--jobs", "1"]
    assert main(["regimes", *arguments, "--policy", "lru_host"]) == 0
    [row] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("small contexts, 2.5/s, 8,000 tokens, fcfs")
    ]
    assert row.count("1.00 (1.00–1.00)") == 2
    assert main(["regimes", "--regime", "huge"]) == 2


def test_the_interval_of_a_ratio_is_that_of_its_pairs() -> None:
    assert ratio_text([(2.0, 1.0)]) == "2.00"
    assert ratio_text([(1.0, 1.0), (4.0, 1.0), (2.0, 1.0)]) == "2.33 (0.36–11.18)"


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
