"""The GPU suite at tiny shapes on the CPU: every part gives rows, the files keep what there is, the report claims nothing."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_suite.kind import GPU
from benchmarks.gpu_suite.parts import JOBS, PARTS, missing
from benchmarks.suite import kept
from benchmarks.suite.child import part
from benchmarks.suite.sizes import TINY, Row, TransferWay
from benchmarks.suite.suite import environment
from benchmarks.suite.suite import main as suite
from benchmarks.suite.timing import timed

PROJECT = Path(__file__).parents[2]
ALONE = "kernels"  # in a process of its own, as the suite runs every part, and from a copy of the tree
HERE = ("smoke", "decode")
PEERS = [name for name, part in PARTS.items() if part.packages]
OTHERS = [name for name in PARTS if name not in (ALONE, *HERE, *PEERS, "kinds")]
"""Without `kinds`, which is `tokens` of other models."""


def run_tiny(names: Sequence[str], out: Path) -> dict[str, list[Row]]:
    """The rows of parts at tiny shapes, each of which has to end well."""
    (out / "none").mkdir(parents=True, exist_ok=True)
    status = suite(GPU, [*names, "--tiny", "--out", str(out), "--kept", str(out / "none"), "--limit-s", "3600"])
    parts = json.loads((out / "results.json").read_text())["parts"]
    errors = {name: part_report.get("error") for name, part_report in parts.items() if part_report["status"] != "done"}
    assert (status, errors) == (0, {})
    return {name: part_report["rows"] for name, part_report in parts.items()}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the suite writes at tiny shapes."""
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def rows(out: Path) -> dict[str, list[Row]]:
    """The rows of a part in a process of its own, and of others in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", environment(GPU, "decode", True)["XLA_FLAGS"])
        return run_tiny([ALONE], out) | {name: list(part(GPU, name)(TINY)) for name in HERE}


def test_parts_run_at_tiny_shapes(rows: dict[str, list[Row]]) -> None:
    assert all(rows.values())
    assert failures(rows) == set()


def failures(rows: dict[str, list[Row]]) -> set[tuple[str, str]]:
    """What could not be measured, by part."""
    measured = [(name, row) for name, part_rows in rows.items() for row in part_rows]
    return {(name, row["implementation"]) for name, row in measured if isinstance(row.get("error"), str)}


@pytest.mark.slow
def test_the_other_parts_run_at_tiny_shapes(tmp_path: Path) -> None:
    rows = run_tiny(OTHERS, tmp_path)
    assert all(rows.values())
    checking = ("tokens", "memcheck", "deep", "products")
    assert all(row.get("ok", True) for name in checking for row in rows[name])
    assert sum("ok" in row for row in rows["deep"]) == 2
    assert {row["implementation"] for row in rows["products"]} == {"xla", "jinfercept", "mosaic", "fragments"}
    assert {row["implementation"] for row in rows["products"] if "skipped" in row} == {
        "mosaic",
        "fragments",
    }  # they need a Hopper
    assert [(row["policy"], row["by"], row["copied_in_tokens"] > 0) for row in rows["tokens"]] == [
        ("swap", "auto", True),
        ("copy_ahead", "auto", True),
        ("preserve", "cpu", False),
    ]
    assert len({row["policy"] for row in rows["policies"]}) == 6
    assert [row["other_tokens"] for row in rows["policies"]] == [0] * 6
    check_agents(rows["agents"])
    check_transfers(rows["overlap"], TINY.overlap_ways)
    assert all(row["embed_s"] > 0 for row in rows["overlap"] if row["pages"])
    assert failures(rows) == set()


def check_agents(rows: Sequence[Row]) -> None:
    """Another policy stands beside ours in the same order, each with its turns and with what the simulator says."""
    contenders = [("copy_ahead", "missing_work"), ("lru_host", "missing_work"), ("lru_host", "fcfs")]
    measured = [row for row in rows if "turns" in row]
    assert [(row["policy"], row["order"]) for row in measured] == contenders
    assert [(row["policy"], row["order"]) for row in rows if "simulated" in row] == contenders
    for row in measured:
        delays = [turn["delay_s"] for turn in row["turns"]]
        assert len(delays) == row["requests"] > 0
        assert np.mean(delays) == pytest.approx(row["turn_delay_s"]["mean"])


@pytest.mark.usefixtures("rows")
def test_what_comes_back_is_few_files_of_limited_size(out: Path) -> None:
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert {"results.json", "autotune.tar", "cache-1.tar"} <= files.keys()
    assert len(files) <= 4
    assert max(files.values()) < 16 << 20


def test_a_start_works_and_moved_contexts_are_right(rows: dict[str, list[Row]]) -> None:
    assert all(row["ok"] for row in rows["smoke"])
    assert {row["check"] for row in rows["smoke"]} == {"start", "moved tokens", "compiled"}
    start = next(row for row in rows["smoke"] if row["check"] == "start")
    assert start["pending"] > 0, "it starts as users do"


def check_transfers(rows: Sequence[Row], ways: Sequence[TransferWay]) -> None:
    """All ways in their order and all directions are there, held against one rate of the link."""
    kinds = dict.fromkeys((row["staging_pages"], row["way"]) for row in rows)
    assert list(kinds) == [(*way, direction) for way in ways for direction in ("none", "out", "in", "both")]
    assert all(row["bytes_per_s"] > 0 for row in rows if row["way"] != "none")
    assert len({row["link_bytes_per_s"] for row in rows if row["way"] == "in"}) == 1  # of one large array


def test_the_time_of_every_operation_stands_beside_a_decode_step(rows: dict[str, list[Row]]) -> None:
    measured = [row for row in rows["decode"] if row["step"] in ("trace", "operation")]
    assert all(row["graphs"] for row in measured)
    assert {row["chunk"] for row in measured} == {0, 2, TINY.mixed[2]}, "steps with a chunk too"
    trace, *operations = [row for row in measured if not row["chunk"]]
    assert (trace["step"], {row["step"] for row in operations}) == ("trace", {"operation"})
    assert any(" f32[8,128]" in row["shape"] for row in operations)  # the products of the hidden layers


def test_three_commands_fit_into_a_quarter_of_an_hour_and_every_other_job_into_nine_minutes() -> None:
    limits_s = {name: sum(part.limit_s for part in job.values()) for name, job in JOBS.items()}
    assert [limits_s[job] for job in "ABC"] == [170, 400, 170]
    assert max(limits_s.values()) <= 540


def test_a_timing_refuses_uploads_of_its_inputs() -> None:
    double, numbers = jax.jit(lambda x: 2 * x), np.ones(8, np.float32)
    on_device = jax.device_put(numbers)
    assert timed(lambda: double(on_device), 0.001).seconds > 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
        timed(lambda: double(numbers), 0.001)


def test_what_is_missing_is_known_without_an_import_and_says_what_it_prevents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str, version: str, *requires: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")

    installed("jax", "0.9.2")
    installed("jax-cuda13-plugin", "0.0.1")
    installed("pydantic", "2.12.0", "nowhere-to-be-found>=1", 'also-not-there; extra == "email"')
    monkeypatch.syspath_prepend(str(tmp_path))  # before what is really installed
    lacking = {lack.what: lack.prevents for lack in missing()}
    assert lacking["jax<0.13,>=0.11.2 (there is 0.9.2)"] == "perhaps every part"
    assert "nowhere-to-be-found, which pydantic needs" in lacking
    assert any(what.endswith("(there is jax-cuda13-plugin 0.0.1)") for what in lacking)
    assert not any("also-not-there" in what for what in lacking)


@pytest.mark.slow
def test_a_part_runs_from_a_copy_of_the_tree_in_which_nothing_is_installed(tmp_path: Path) -> None:
    """The folders that a machine needs, linked without the environment and Git; the project is not an installed package."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("benchmarks", "jinfercept", "pyproject.toml", "tools"):
        (tree / name).symlink_to(PROJECT / name)
    script, out = tree / "tools" / "gpu_suite", tmp_path / "out"
    state = "Test GPU, 580.159.04, 81559 MiB, 345 MHz, 2619 MHz, 31, 70.12 W"
    answers = f'case "$1" in *name*) echo "{state}";; *) echo 81559;; esac'
    path = fake_program(tmp_path, "nvidia-smi", answers)
    environment = {"PYTHON": sys.executable, "PATH": path, "HOME": str(tmp_path)}
    command = [script, ALONE, "--tiny", "--out", out, "--commit", "c0ffee"]
    run = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert run.stderr.index("missing: ") < run.stderr.index(f"{ALONE}: ")
    report = json.loads((out / "results.json").read_text())
    assert report["parts"][ALONE]["status"] == "done"
    assert len(report["parts"][ALONE]["rows"]) == len(TINY.attention)
    assert (report["machine"]["commit"], report["machine"]["gpu"]["name"]) == ("c0ffee", "Test GPU")
    assert not any("NVIDIA GPU" in lack or "GPU memory" in lack for lack in report["machine"]["missing"])
    assert {"date", "kept", "machine", "tiny", "version"} <= report.keys()
    with tarfile.open(out / "cache-1.tar") as tar:
        assert tar.getnames()


def test_what_a_run_leaves_is_found_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 40_000)
    first, out, second = (tmp_path / name for name in ("first", "out", "second"))
    for name in ("xla_gpu_per_fusion_autotune_cache_dir/fusion.textproto", "autotune/last.textproto", "old-cache"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text("chosen")
    began_s = time.time() - 60
    os.utime(first / "old-cache", (0, 0))  # of another run
    for number in range(4):
        (first / f"{number}-cache").write_bytes(bytes(12_000))
        os.utime(first / f"{number}-cache", (began_s + number, began_s + number))
    (first / "huge-cache").write_bytes(bytes(50_000))
    kept.keep_choices(first, "decode")
    (first / "autotune/last.textproto").write_text("less")  # of a process that has found the rest compiled
    kept.keep_choices(first, "decode")
    out.mkdir()
    kept.pack(first, began_s, out)
    assert sorted(path.name for path in out.iterdir()) == ["autotune.tar", "cache-1.tar", "cache-2.tar"]
    assert all(path.stat().st_size <= 40_000 for path in out.iterdir())
    (out / "cache-3.tar").write_bytes((out / "cache-1.tar").read_bytes()[:700])  # cut off
    assert kept.unpack(out, second) == ["autotune.tar", "cache-1.tar", "cache-2.tar", "cache-3.tar"]
    files = {str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()}
    assert files == {
        "autotune/decode.textproto",
        "xla_gpu_per_fusion_autotune_cache_dir/fusion.textproto",
        *(f"{number}-cache" for number in range(4)),
    }
    assert (second / "autotune/decode.textproto").read_text() == "chosen"
    kept.pack(second, time.time() - 60, out)  # what was brought along is left for the next one too
    with tarfile.open(out / "cache-1.tar") as tar:
        assert "0-cache" in tar.getnames()


def test_torch_times_products_and_a_whole_step() -> None:
    pytest.importorskip("torch", reason="the peers need torch")
    for name, count in (("torch_products", len(TINY.product_tokens)), ("torch_step", len(TINY.decodes))):
        measured = list(part(GPU, name)(TINY))
        assert len(measured) == count
        assert all(row["seconds"] > 0 for row in measured)


def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    checks = 'while [[ $1 == --* ]]; do shift 2; done; echo "========= COMPUTE-SANITIZER"; exec "$@"'
    monkeypatch.setenv("PATH", fake_program(tmp_path, "compute-sanitizer", checks))
    out = tmp_path / "full"
    assert suite(GPU, ["deep", "memcheck", "--out", str(out)]) == 1  # full sizes, and no GPU
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert {part_report["status"] for part_report in parts.values()} == {"failed"}
    assert "JAX finds no GPU" in parts["memcheck"]["error"]
    assert parts["memcheck"]["checker"] == [" COMPUTE-SANITIZER"]
    assert main(["gpu-report", str(out / "results.json")]) == 0


def test_a_part_that_is_late_is_cut_off_and_keeps_its_place(tmp_path: Path) -> None:
    out = tmp_path / "late"
    assert suite(GPU, ["policies", "idle", "--tiny", "--limit-s", "0.3", "--out", str(out)]) == 1
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert [parts[name]["status"] for name in ("policies", "idle")] == ["cut off", "not run"]
    assert parts["policies"]["error"].startswith("ended after 0 s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no such part"),
        (["--limit-s", "0"], "--limit-s is too small"),
        (["--out", "/proc/nowhere"], "--out cannot be written"),
        (["--kept", "/nowhere"], "--kept is no folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite(GPU, ["--out", str(tmp_path / "out.json"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_old_results_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("kept")
    assert suite(GPU, ["--tiny", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "results.json").read_text() == "kept"
    assert "has results already" in capsys.readouterr().err


def fake_program(folder: Path, name: str, lines: str) -> str:
    """A search path that has a program of this name, which a machine with a GPU has, of these lines of Bash."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{lines}\n")
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"
