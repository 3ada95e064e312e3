"""The TPU suite at tiny shapes on the CPU: what it has of its own, beside what it shares with the GPU's. No TPU runs here."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks.__main__ import main
from benchmarks.suite.child import part
from benchmarks.suite.models import LLAMA_3_2_3B
from benchmarks.suite.sizes import GIB
from benchmarks.suite.suite import main as suite
from benchmarks.suite.trace import plane_events
from benchmarks.tpu_suite.kind import LARGE, ON_CPU, SMALL, TPU, full
from benchmarks.tpu_suite.parts import missing
from jinfercept.models.model import kv_bytes_per_token, param_bytes
from tests.support.gpu_reports import report_file


def test_a_check_and_the_report_at_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = part(TPU, "checks")(replace(ON_CPU, checked=ON_CPU.checked[1:]))
    assert (row["check"], row["ok"]) == ("reference attention", True), "of pages as those of TPUs lie"
    path = report_file(tmp_path, {"checks": [row]}, tiny=True, suite="tpu")
    assert main(["gpu-report", path]) == 0
    assert "tiny shapes or no TPU" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_parts_run_at_tiny_shapes(tmp_path: Path) -> None:
    assert suite(TPU, ["--tiny", "--out", str(tmp_path), "--kept", str(tmp_path), "--limit-s", "3600"]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["suite"] == "tpu"
    assert {part_report["status"] for part_report in report["parts"].values()} == {"done"}
    rows = {name: part_report["rows"] for name, part_report in report["parts"].items()}
    assert all(row["ok"] for name in ("smoke", "checks", "tokens", "kinds") for row in rows[name])
    assert {row["implementation"] for row in rows["kernels"]} == {"reference"}
    assert [(row["implementation"], row.get("ok")) for row in rows["experts"]] == [("gmm", True), ("xla", None)]
    assert not any("error" in row for name in ("kernels", "experts") for row in rows[name])
    assert not (tmp_path / "autotune.tar").exists()


def test_sizes_fit_the_memory_of_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 16 * GIB})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert full() is SMALL
    weights = param_bytes(LLAMA_3_2_3B, SMALL.dtype)
    pages = SMALL.pool_tokens * kv_bytes_per_token(LLAMA_3_2_3B, SMALL.dtype)
    assert weights + pages < 15 * GIB
    device.memory_stats = lambda: {"bytes_limit": 31 * GIB}
    assert full() is LARGE


def test_without_a_tpu_the_suite_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(lack.fatal and not lack.with_tiny for lack in missing() if lack.what.startswith("libtpu"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert suite(TPU, ["overlap", "--out", str(tmp_path), "--kept", str(tmp_path)]) == 1  # full sizes
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert "JAX finds no TPU" in parts["overlap"]["error"]


def test_operations_of_a_tpu_are_read_of_their_own_line_by_their_names() -> None:
    def line(name: str, *events: Any) -> Any:
        return SimpleNamespace(name=name, events=events)

    def event(name: str, start: float) -> Any:
        return SimpleNamespace(name=name, stats=[("bytes_accessed", 4)], start_ns=start, duration_ns=10.0)

    operations = line("XLA Ops", event("%fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop", 5.0))
    plane = SimpleNamespace(name="/device:TPU:0", lines=[line("Steps", event("1", 0.0)), operations])
    [read] = plane_events(plane)
    assert (read.operation, read.name, read.start, read.end) == ("fusion.1", "fusion.1", 5.0, 15.0)
