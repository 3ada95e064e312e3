"""`python -m studies`, its overview and help, and `paper`: loads at equal latency, the published numbers, and the report."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from studies.__main__ import COMMANDS, main
from studies.paper.command import FIGURE
from studies.paper.report import (
    Capacity,
    Study,
    Summary,
    capacity,
    capacity_ratio,
    latency_threshold,
    load_figure,
    markdown,
    panels,
)
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


ROOT = Path(__file__).parents[2]


def test_the_overview_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in shown] == []


def test_every_study_explains_its_flags_without_jax() -> None:
    code = (
        "import contextlib, sys\nfrom studies.__main__ import COMMANDS, main\nfor name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '--help'])\n"
        "print({'jax', 'matplotlib', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [name for name in COMMANDS if f"usage: python -m studies {name} " not in done.stdout] == []
    assert done.stdout.endswith("set()\n")


def test_a_package_that_is_missing_is_said_before_a_study_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("studies.__main__.NEEDED", ("no_such_package",))
    assert main(["deciding"]) == 2
    assert "studies need no_such_package: pip install '.[studies]'" in capsys.readouterr().err
    assert main(["--help"]) == 0
