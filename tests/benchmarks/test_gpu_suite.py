"""The GPU suite at tiny shapes on the CPU: every part gives rows, the file keeps what there is, the report claims nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_aims import AIMS, Figure
from benchmarks.gpu_predictions import predicted_table, predictions
from benchmarks.gpu_report import DETAILS
from benchmarks.gpu_suite.child import part
from benchmarks.gpu_suite.idle import gaps
from benchmarks.gpu_suite.missing import satisfies
from benchmarks.gpu_suite.parts import JOBS, PARTS
from benchmarks.gpu_suite.sizes import FULL, TINY, Row
from benchmarks.gpu_suite.suite import main as suite
from benchmarks.gpu_suite.trace import Event, copies

OTHERS = ("torch_peer", "memcheck", "async_dispatch", "gptj", "overflow")
"""Parts beside those of `rows`: one needs torch, three are others once more, the last one has an engine for each mode."""
JAX_PARTS = [name for name in PARTS if name not in OTHERS]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """The rows of every one of `JAX_PARTS`."""
    return {name: list(part(name)(TINY)) for name in JAX_PARTS}


def report_file(folder: Path, parts: dict[str, list[Row]], **changes: Any) -> str:
    found = {name: {"status": "done", "device": "Test GPU", "rows": rows} for name, rows in parts.items()}
    report = {"version": 1, "date": "2026-01-02T03:04:05+00:00", "tiny": False, "parts": found}
    machine = {"commit": "0123456789abcdef"}
    path = folder / "report.json"
    path.write_text(json.dumps(report | {"machine": machine} | changes))
    return str(path)


def figures(number: int, parts: dict[str, list[Row]]) -> list[Figure]:
    return AIMS[number].figures(parts)


def test_every_part_runs_at_tiny_shapes(rows: dict[str, list[Row]]) -> None:
    assert all(rows[name] for name in JAX_PARTS)
    assert all("error" not in row for found in rows.values() for row in found if "check" not in row)
    assert json.loads(json.dumps(rows)) == rows


def test_kernels_and_tokens_are_right(rows: dict[str, list[Row]]) -> None:
    assert all(row["ok"] for row in rows["correctness"])
    assert any(row["check"] == "tokens" and row["copied_in_tokens"] > 0 for row in rows["correctness"])


def test_transfers_are_measured_both_ways_of_transferring_and_in_all_directions(rows: dict[str, list[Row]]) -> None:
    kinds = {(row["parts"], row["staging"], row["way"]) for row in rows["transfers"]}
    ways = ((2, 1), (1, 2))  # pieces of a page, pages of an array
    assert kinds == {(*way, direction) for way in ways for direction in ("none", "out", "in", "both")}
    assert all(row["bytes_per_s"] > 0 for row in rows["transfers"] if row["way"] != "none")


def test_all_policies_serve_the_same_tokens(rows: dict[str, list[Row]]) -> None:
    assert len({row["policy"] for row in rows["policies"]}) == 6
    assert [row["other_tokens"] for row in rows["policies"]] == [0] * 6


@pytest.mark.slow
def test_overflow_is_measured_with_both_kinds_of_host_memory() -> None:
    *cells, checked = part("overflow")(TINY)
    assert {(row["mode"], row["moved_tokens"] > 0) for row in cells if "swap" in row["mode"]} == {
        ("our swap", True),
        ("our swap by layer", True),
        ("our swap by layer, pageable", True),
    }
    assert all(row["preemptions"] > 0 for row in cells)
    assert checked["checks"] > 0


def test_every_part_has_columns_in_the_report() -> None:
    assert {part.module for part in PARTS.values()} <= DETAILS.keys()


def test_the_full_sizes_cover_what_the_aims_speak_of() -> None:
    decoding = {(case.heads.dim, case.rows, case.context) for case in FULL.attention if case.chunk == 1}
    assert {(256, 64, 2048), (128, 64, 2048), (256, 32, 2048), (128, 256, 8192)} <= decoding
    assert {(64, 1000), (1, 1000), (256, 1000), (48, 8000)} <= {*FULL.decodes}
    assert len(FULL.transfer_parts) > 1


def test_a_job_ends_before_nine_minutes_are_over() -> None:
    assert all(sum(part.limit_s for part in job.values()) < 540 for job in JOBS)


def test_every_way_of_sampling_is_measured(rows: dict[str, list[Row]]) -> None:
    timed = [row["sampling"] for row in rows["sampled"] if row["step"] == "decode"]
    assert timed == ["greedy", "drawn", "filtered", "shaped", "logprobs"]


def test_versions_are_compared_by_their_numbers() -> None:
    assert satisfies("0.11.2", ">=0.11.2,<0.13")
    assert satisfies("0.12.0.dev3", ">=0.11.2,<0.13")
    assert not satisfies("0.13.0", ">=0.11.2,<0.13")
    assert not satisfies("0.9.2", ">=0.11.2")


def test_the_torch_peer_times_every_case() -> None:
    pytest.importorskip("torch", reason="the peer needs torch")
    found = list(part("torch_peer")(TINY))
    assert len(found) == len(TINY.attention)
    assert all(row["seconds"] > 0 for row in found)


def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = tmp_path / "full.json"
    assert suite(["torch_peer", "decode", "--out", str(out)]) == 1  # full sizes, and no GPU
    parts = json.loads(out.read_text())["parts"]
    assert {found["status"] for found in parts.values()} == {"failed"}
    assert "JAX finds no GPU" in parts["decode"]["error"]
    assert main(["gpu-report", str(out)]) == 0


def test_a_part_that_is_late_is_cut_off_and_keeps_its_place(tmp_path: Path) -> None:
    out = tmp_path / "late.json"
    assert suite(["policies", "idle", "--tiny", "--limit-s", "0.3", "--out", str(out)]) == 1
    parts = json.loads(out.read_text())["parts"]
    assert [parts[name]["status"] for name in ("policies", "idle")] == ["cut off", "not run"]


def test_the_script_writes_one_file_that_the_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny.json"
    script = Path(__file__).parents[2] / "tools" / "gpu_suite"
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([script, "ceilings", "--tiny", "--out", out], check=True, env=environment)
    report = json.loads(out.read_text())
    assert report["parts"]["ceilings"]["status"] == "done"
    assert {"date", "machine", "tiny", "version"} <= report.keys()
    assert main(["gpu-report", str(out), "--out", str(tmp_path / "r.md")]) == 0
    assert capsys.readouterr().out.count("not measured") == len(AIMS)
    assert "### ceilings" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "no such part"),
        (["--limit-s", "0"], "--limit-s is too small"),
        (["--out", "/nowhere/at/all.json"], "--out cannot be written"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite(["--out", str(tmp_path / "out.json"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_old_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "old.json"
    out.write_text("kept")
    assert suite(["--tiny", "--out", str(out)]) == 2
    assert out.read_text() == "kept"
    assert "is there already" in capsys.readouterr().err


def test_idle_time_is_what_no_kernel_of_any_stream_covers() -> None:
    found = gaps([(0.0, 4e9), (6e9, 10e9), (1e9, 5e9), (9e9, 10e9)])
    assert found == {"idle_share": 0.1, "busy_s": 9.0, "largest_gap_s": 1.0}


# -- the report --------------------------------------------------------------------------------------------------------


def attention(implementation: str, rows: int, chunk: int, context: int, seconds: float, **more: Any) -> Row:
    case = {"heads": "16/16 × 256", "rows": rows, "chunk": chunk, "context": context}
    return case | {"implementation": implementation, "seconds": seconds, "copy_share": 0.9, "matmul_share": 0.4} | more


def test_decode_counts_by_its_worst_case_and_only_ours() -> None:
    good = [attention("triton", 64, 1, 2048, 1.0), attention("cudnn", 64, 1, 2048, 0.5, copy_share=0.1)]
    [figure] = figures(2, {"kernels": good})
    assert figure.met
    [figure] = figures(2, {"kernels": [*good, attention("triton", 32, 1, 8192, 1.0, copy_share=0.6)]})
    assert not figure.met
    assert "60% at least (32 × 8,192" in figure.reached
    assert figures(2, {"kernels": [attention("triton", 1, 1, 8192, 1.0)]}) == []


def test_chunks_are_held_against_the_best_peer_that_worked() -> None:
    kernels = [attention("triton", 1, 512, 512, 1.0), attention("cudnn", 1, 512, 512, 2.0)]
    assert figures(3, {"kernels": kernels})[0].met
    faster = [attention("torch", 1, 512, 512, 0.7)]
    [figure] = figures(3, {"kernels": kernels, "torch_peer": faster})
    assert not figure.met
    assert "0.70 × torch" in figure.reached
    assert figures(3, {"kernels": kernels[:1], "torch_peer": [{"error": "refused"}]}) == []


def test_transfers_count_only_where_they_use_the_link() -> None:
    row = {"step": "decode", "way": "out", "parts": 1, "share": 1.0, "bytes_per_s": 4e10}
    idle, full = row | {"link_share": 0.4, "slowdown": 0.0}, row | {"link_share": 0.9, "slowdown": 0.04}
    assert [figure.met for figure in figures(1, {"transfers": [idle]})] == [False]
    assert [figure.met for figure in figures(1, {"transfers": [idle, full]})] == [True]
    slow = full | {"parts": 4, "slowdown": 0.2}
    assert [figure.met for figure in figures(1, {"transfers": [idle, full, slow]})] == [True, False]


def test_policies_are_held_against_the_best_of_the_others() -> None:
    def row(policy: str, latency: float, unfinished: int = 0) -> Row:
        return {
            "policy": policy,
            "model": "m",
            "unfinished": unfinished,
            "normalized_latency_paper_ms_per_token": {"mean": latency},
        }

    others = [row("swap", 30.0), row("min_waste", 12.0)]
    [figure] = figures(6, {"policies": [row("copy_ahead", 11.0), *others]})
    assert figure.met
    assert "11.0 ms/token, 0 unfinished; min_waste 12.0, 2 others" in figure.reached
    assert not figures(6, {"policies": [row("copy_ahead", 13.0), *others]})[0].met
    assert not figures(6, {"policies": [row("copy_ahead", 11.0, unfinished=1), *others]})[0].met
    assert figures(6, {"policies": others}) == []


def test_figures_say_on_what_and_when_they_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = [{"model": "m", "depth": 1, "batch": 64, "context": 1, "method": "trace", "idle_share": 0.02, "step_s": 1.0}]
    assert main(["gpu-report", report_file(tmp_path, {"idle": idle})]) == 0
    shown = capsys.readouterr().out
    assert "2.0%, by trace | yes | Test GPU, 2026-01-02 |" in shown
    assert shown.count("not measured") == len(AIMS) - 1


def test_measured_steps_stand_beside_predicted_ones(tmp_path: Path) -> None:
    step = {"gpu": "h100", "model": "m", "library": "cuBLAS", "rows": 64, "context": 1000, "default_buckets": False}
    guesses = {"seconds": 0.009, "ratio": 1.2, "pessimistic": {"seconds": 0.012, "ratio": 1.6}}
    bill = {"commit": "c0ffee", "date": "2026-01-01", "steps": [step | guesses]}
    (tmp_path / "before.json").write_text(json.dumps(bill))
    row = {"model": "m", "step": "decode", "batch": 64, "context": 1000, "layers_per_step": 4, "buckets": "fitted"}
    rows = [row | {"seconds": 0.0108, "times": 1.4}, row | {"batch": 1, "seconds": 0.006, "times": 1.2}]
    table = predicted_table("NVIDIA H100 80GB HBM3", {"decode": rows}, predictions(tmp_path))
    assert "for H100, before.json of commit c0ffee" in table[0]
    assert (
        table[-2] == "| m, 64 × 1,000 | 4 | fitted | 10.80 ms | 9.00 ms | 1.20 | 12.00 ms | 0.90 | 1.40 | 1.20 | 1.60 |"
    )
    assert table[-1] == "| m, 1 × 1,000 | 4 | fitted | 6.00 ms |  |  |  |  | 1.20 |  |  |"
    assert "no table" in predicted_table("GPU", {"decode": rows}, predictions(tmp_path / "none"))[0]


def test_copies_count_as_hidden_where_kernels_run_at_the_same_time() -> None:
    kernels = [Event("Stream #1", "layers", 0.0, 10.0), Event("Stream #1", "head", 10.0, 12.0)]
    moved = [Event("Stream #2", "MemcpyD2H", 8.0, 16.0), Event("Stream #3", "MemcpyH2D", 20.0, 21.0)]
    out, into = copies([*kernels, *moved])
    assert (out["copy"], out["count"], out["hidden_share"], out["lines"]) == ("MemcpyD2H", 1, 0.5, ["Stream #2"])
    assert into["hidden_share"] == 0.0


def test_tiny_runs_give_no_figures_and_can_be_drawn(
    tmp_path: Path, rows: dict[str, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "gpu.png"
    assert main(["gpu-report", report_file(tmp_path, rows, tiny=True), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("not measured") == len(AIMS)
    assert "gives no figure" in shown
    assert picture.stat().st_size > 10_000


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert main(["gpu-report", str(path)]) == 2
    assert "not a file of the GPU suite" in capsys.readouterr().err
