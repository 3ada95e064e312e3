"""The report of the GPU suite: aims are met by what was measured on a GPU, and by nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_report import AIMS, Figure, predicted_table, predictions
from benchmarks.suite.sizes import Row


def figures(number: int, parts: dict[str, list[Row]]) -> list[Figure]:
    return AIMS[number].figures(parts)


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


def test_the_delay_of_turns_has_an_interval_and_decides_nothing_where_that_holds_one() -> None:
    def run(policy: str, order: str, delays: list[float]) -> Row:
        turns = [{"session": number // 2, "delay_s": delay} for number, delay in enumerate(delays)]
        workload = {"live": 16, "scale_tokens": 0.4, "model": "m"}
        summary = {"mean": sum(delays) / len(delays), "p99": max(delays)}
        common = {"policy": policy, "order": order, "workload": workload, "requests": len(delays)}
        return common | {"turn_delay_s": summary, "turns": turns}

    ours = run("copy_ahead", "missing_work", [1.0, 2.0] * 20)
    close = run("lru_host", "missing_work", [0.1, 0.2] * 19 + [30.0, 25.0])
    slow = run("lru_host", "fcfs", [3.0, 4.0] * 20)
    simulated = [row | {"simulated": {"turn_delay_s": row["turn_delay_s"]}} for row in (ours, slow)]
    alone = [{name: row[name] for name in ("policy", "order", "simulated")} for row in simulated]
    undecided, decided = figures(7, {"agents": [ours, close, slow, *alone]})
    assert (undecided.met, decided.met) == (None, True)
    assert "it decides nothing" in undecided.reached
    assert "1.50 and 3.50 s in 40 and 40 turns, 0.43 × (95 % interval 0.43 to 0.43); 0.43 × in the s" in decided.reached
    assert decided.what.endswith("against lru_host fcfs")
    [figure] = figures(
        7, {"long_agents": [{name: row[name] for name in row if name != "turns"} for row in (ours, slow)]}
    )
    assert figure.met is None, "an earlier file has no turns"


def test_measured_steps_stand_beside_predicted_ones(tmp_path: Path) -> None:
    step = {"gpu": "h100", "model": "m", "library": "cuBLAS", "rows": 64, "context": 1000, "default_buckets": False}
    step |= {"chunk": 0, "seconds": 0.009, "ratio": 1.2}
    steps = [step, step | {"chunk": 448, "default_buckets": True, "seconds": 0.016}]
    bill = {"commit": "c0ffee", "date": "2026-01-01", "steps": steps}
    (tmp_path / "bill.json").write_text(json.dumps(bill))
    row = {"step": "decode", "model": "m", "batch": 64, "context": 1000, "chunk": 0, "layers_per_step": 4}
    row |= {"sampling": "greedy"}
    rows = [row | {"seconds": 0.0108, "times": 1.4}, row | {"batch": 1, "seconds": 0.006, "times": 1.2}]
    rows += [
        rows[0] | {"step": "mixed", "chunk": 448, "seconds": 0.02},
        rows[0] | {"sampling": "drawn"},
        {"step": "kernels"},
    ]
    table = predicted_table("NVIDIA H100 80GB HBM3", {"decode": rows}, predictions(tmp_path / "bill.json"))
    assert "for H100, bill.json of commit c0ffee" in table[0]
    assert table[-3] == "| m, 64 × 1,000 | 4 | 10.80 ms | 9.00 ms | 1.20 | 1.40 | 1.20 |"
    assert table[-2] == "| m, 1 × 1,000 | 4 | 6.00 ms |  |  | 1.20 |  |"
    assert table[-1] == "| m, 64 × 1,000 + 448 | 4 | 20.00 ms | 16.00 ms | 1.25 | 1.40 | 1.20 |"
    assert "no table" in predicted_table("GPU", {"decode": rows}, predictions(tmp_path / "none"))[0]


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert main(["gpu-report", str(path)]) == 2
    assert "not a file of a suite" in capsys.readouterr().err
