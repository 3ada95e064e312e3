"""`python -m studies paper`: loads at equal latency, the published numbers, and the report from both."""

import csv
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.policies import SETTINGS
from studies.__main__ import main
from studies.capacity import Capacity, capacity, capacity_ratio, latency_threshold
from studies.paper.command import FIGURE
from studies.paper.report import ABLATION, WIDE_STEPS, Study, Summary, load_figure, markdown, panels, waste_shares
from studies.plots import Bars, CurvePanel

GPTJ = "paper-gptj-6b-a100"


def a_report(policy: str, rate: float, latency: float, workload: str = "mixed") -> dict[str, Any]:
    return {
        "profile": GPTJ,
        "workload": workload,
        "policy": policy,
        "rate": rate,
        "seed": 0,
        "kv_tokens": 1000,
        "step_tokens": 2560 if "discard" in policy or "wide" in workload else 384,
        "requests": 50,
        "unfinished": 5,
        "normalized_latency_paper_ms_per_token": {"mean": latency},
        "waste_token_s": {"preserve": 100.0, "recompute": 200.0, "stall": 0.0, "fetch": 0.0},
        "recompute_share": {"forward_time": 0.4},
        "simulated_s": 10.0,
    }


def a_summary(figure: Path | None = None) -> Summary:
    """Discard reaches 50 ms at 2 requests/s, min_waste at 4."""
    latencies = {"discard": (10.0, 50.0, 250.0), "min_waste": (10.0, 20.0, 31.25), "bound": (1.0, 1.0, 1.0)}
    reports = [a_report(policy, float(rate), ms) for policy, of in latencies.items() for rate, ms in enumerate(of, 1)]
    reports += [a_report("min_waste", 4.0, 50.0), a_report("discard", 9.0, 12.0, "chat")]
    reports.append({"profile": GPTJ, "workload": "mixed", "policy": "swap", "rate": 1.0, "error": "gone"})
    study = Study(GPTJ, reports, 1000, "for a test")
    return Summary([study], load_figure(figure) if figure else {}, "a trace", 300.0, 0)


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of the first table under a title, by their first one."""
    lines = text[text.index(title) :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    table = {}
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[first] = cells
    return table


def test_a_limit_lies_between_points_on_a_logarithmic_line() -> None:
    points = [(1.0, 10.0), (2.0, 20.0), (4.0, 80.0), (5.0, 30.0)]
    assert capacity(points, 40.0) == pytest.approx((3.0, ""))
    assert capacity(points, 20.0) == (2.0, "")
    assert capacity(points, 5.0) == (1.0, "<")
    assert capacity(points, 100.0) == (5.0, ">")
    assert capacity([], 5.0) is None
    assert latency_threshold([points, [(1.0, 8.0)]]) == 40.0


@pytest.mark.parametrize(
    ("load", "base", "shown"),
    [
        (Capacity(4.0), Capacity(2.0), "2.00"),
        (Capacity(4.0, ">"), Capacity(2.0), ">2.00"),
        (Capacity(1.0, "<"), Capacity(2.0), "<0.50"),
        (Capacity(4.0), Capacity(2.0, "<"), ">2.00"),
        (Capacity(4.0), Capacity(8.0, ">"), "<0.50"),
        (Capacity(4.0, ">"), Capacity(2.0, "<"), ">2.00"),
        (Capacity(8.0, ">"), Capacity(8.0, ">"), "-"),
        (Capacity(1.0, "<"), Capacity(1.0, "<"), "-"),
        (None, Capacity(1.0), "-"),
    ],
)
def test_a_ratio_of_loads_says_what_is_known_of_it(load: Capacity | None, base: Capacity, shown: str) -> None:
    assert capacity_ratio(load, base) == shown


def test_the_report_compares_loads_at_equal_latency() -> None:
    text = markdown(a_summary())
    loads = rows(text, "### Load at equal latency")
    assert loads["discard"] == ["2.00", "1.00"]
    assert loads["min_waste"] == ["4.00", "2.00"]
    assert loads["bound"] == [">3.00", ">1.50"]
    assert "50.0 ms per token" in text


def test_the_report_reads_waste_and_ablation_where_discard_is_past_its_limit() -> None:
    text = markdown(a_summary())
    waste = rows(text, "### Waste at 2 requests/s")
    assert waste["discard"] == ["1.00", "2.00", "0.00", "0.00", "3.00", "27", "40.0"]
    assert "bound" not in waste
    ablation = rows(text, "### Ablation at 2 requests/s")
    assert list(ablation) == [setting.policy for setting in ABLATION]
    assert ablation["discard"] == ["vLLM of the time", "50.0", "", ""]
    assert ablation["improved_discard"][1:] == ["-", "", "-24.5%"]


def test_the_report_has_every_rate_and_every_kind() -> None:
    text = markdown(a_summary())
    assert rows(text, "### Figure 2") == {
        "discard": ["10.0", "50.0", "250", "-"],
        "min_waste": ["10.0", "20.0", "31.2", "50.0"],
        "bound": ["1.0", "1.0", "1.0", "-"],
    }
    assert rows(text, "Requests left unfinished")["discard"] == ["10", "10", "10", "-"]
    assert rows(text, "### Each kind alone") == {"chat": ["9", "12.0"]}


def test_shares_of_waste_are_of_the_pool_over_the_run() -> None:
    assert waste_shares(a_report("lru", 1.0, 10.0)) == {"preserve": 0.01, "recompute": 0.02, "stall": 0.0, "fetch": 0.0}


def test_the_ablation_tells_chunks_from_the_size_of_steps() -> None:
    summary = a_summary()
    wide = [a_report("chunked_discard", rate, 40.0, WIDE_STEPS) for rate in (1.0, 2.0)]
    improved = a_report("improved_discard", 2.0, 50.0)
    study = summary.studies[0]._replace(reports=[*summary.studies[0].reports, improved, *wide])
    text = markdown(summary._replace(studies=[study]))
    assert "Steps hold at most 384 query tokens, and where prompts are whole 2,560." in text
    assert "| chunked_discard | or chunks in steps of 2,560, as whole prompts have | 40.0 | -20.0% | |" in text
    assert WIDE_STEPS not in text


def test_the_picture_has_the_papers_policies_and_its_ablation_beside_ours() -> None:
    [[figure_2], [_, ablation]] = panels(a_summary())
    assert [curve.name for curve in figure_2.curves] == ["discard", "min_waste", "bound"]  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(ablation, Bars)
    assert ablation.bars["discard"] == {"ours": 1.0, "the paper's": 1.0}
    assert ablation.bars["improved_discard"] == {"the paper's": pytest.approx(0.755)}
    assert ablation.bars["min_waste"]["ours"] == pytest.approx(0.4)


@pytest.mark.parametrize("derived", [[1, 2], {"kv_tokens": "many"}, {}])
def test_a_profile_that_does_not_say_how_much_it_holds_is_asked_for_it(
    derived: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "machine.json"
    replace(PROFILES[GPTJ], name="mine", tables={"derived": derived}).save(path)
    assert main(["paper", "--profile", str(path), "--out", str(tmp_path)]) == 2
    assert "how much KV does this machine hold?; got mine" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_what_is_done_in_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")

    def interrupt() -> None:
        while "1 of " not in capsys.readouterr().err:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    flags = ["--profile", GPTJ, "--duration", "10", "--rate", "3,8", "--jobs", "1", "--out", str(tmp_path)]
    assert main(["paper", *flags]) == 130
    thread.join()
    assert "runs are done and in" in capsys.readouterr().out
    with (tmp_path / "paper-interrupted.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * (13 + 1) + 6 * 3
    assert not (tmp_path / "paper.csv").exists()


def test_a_machine_on_which_nothing_was_measured_is_told_of() -> None:
    failed = [{"profile": GPTJ, "workload": "mixed", "policy": "lru", "rate": 1.0, "error": "gone"}]
    summary = Summary([Study(GPTJ, failed, 1000, "for a test")], {}, "a trace", 300.0, 0)
    assert "Nothing was measured." in markdown(summary)
    assert panels(summary) == []


def test_the_ablation_consists_of_policies() -> None:
    assert {setting.policy for setting in ABLATION} <= SETTINGS.keys()


def test_the_papers_curves_stand_beside_ours() -> None:
    summary = a_summary(FIGURE)
    loads = rows(markdown(summary), "### Load at equal latency")
    assert loads["discard"][2:] == ["1.38", "1.00"]
    assert loads["min_waste"][2:] == ["1.93", "1.40"]
    figure_2, bars = panels(summary)
    [panel] = figure_2
    assert isinstance(panel, CurvePanel)
    assert sum(curve.reference for curve in panel.curves) == 5
    ours, theirs = ([c.colour for c in panel.curves if c.reference is is_reference] for is_reference in (False, True))
    assert set(ours[:2]) <= set(theirs)
    assert all(isinstance(bar, Bars) for bar in bars)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("panel,system\n", "is no table of the figure"),
        ("panel,system,req_per_s,normalized_latency_ms_per_token\nA,Other,1,2\n", "line 2: no such system"),
        ("panel,system,req_per_s,normalized_latency_ms_per_token\nA,vLLM,1,fast\n", "line 2: not a rate"),
        ("panel,system,req_per_s,normalized_latency_ms_per_token\nA,vLLM,1,-2\n", "line 2: not a rate"),
        ("panel,system,req_per_s,normalized_latency_ms_per_token\nA,vLLM\n", "line 2: not a rate"),
    ],
)
def test_a_reference_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "figure.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_figure(path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reference", "no/such.csv"], "the reference cannot be read"),
        (["--profile", "abacus"], "no such profile"),
        (["--rate", "0"], "rate of arrivals is out of range"),
        (["--duration", "-3"], "duration_s of arrivals is out of range"),
        (["--kv-tokens", "5"], "the KV pool is too small for the longest sequence"),
        (["--jobs", "0"], "--jobs is too small"),
        (["--out", "/dev/null/x"], "--out cannot be made"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["paper", "--duration", "1", "--out", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_command_writes_tables_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.jsonl"
    call = '{"kind": "%s", "prompt": 40, "segments": [{"decode": 5, "call_s": 0.1, "returned": 3}, {"decode": 5}]}\n'
    trace.write_text(call % "math" + call % "chat")
    out = tmp_path / "new" / "folder"
    options = ["--profile", GPTJ, "--trace", str(trace), "--duration", "2", "--rate", "3", "--jobs", "1"]
    assert main(["paper", "--out", str(out), *options]) == 0
    text = (out / "paper.md").read_text()
    assert {"discard", "copy_ahead", "bound", "free_pause"} <= rows(text, "### Figure 2").keys()
    assert rows(text, "### Each kind alone").keys() == {"math", "chat"}
    with (out / "paper.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 13 + 1 + 2 * 3
    assert (out / "paper.png").read_bytes().startswith(b"\x89PNG")
