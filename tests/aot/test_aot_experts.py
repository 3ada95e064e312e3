"""Layers of experts, compiled for A100 and H100 without a GPU: two kernels, and nothing beside them but rows, and weights that
are unpacked for many rows."""

from typing import Any

import pytest

from jinfercept.pallas.triton_grouped import MOST_ROWS, MOST_UNPACKED_BYTES
from tests.aot.cuda import compile_for

GPT_OSS = {"num_experts": 32, "per_token": 4, "hidden_size": 2880, "ffn_size": 2880}
QWEN3 = {"num_experts": 128, "per_token": 8, "hidden_size": 2048, "ffn_size": 768}
MIXTRAL = {"num_experts": 8, "per_token": 2, "hidden_size": 4096, "ffn_size": 14_336}
SAMPLE = {"gpt-oss in mxfp4, 64": GPT_OSS | {"rows": 64, "values": "mxfp4"}}
MODELS = {"gpt-oss": GPT_OSS, "Qwen3": QWEN3, "Mixtral": MIXTRAL}
EVERY = {
    f"{name} in {values}, {rows}": sizes | {"rows": rows, "values": values}
    for name, sizes in MODELS.items()
    for values in (None, "mxfp4", "int4", "int8", "e4m3")
    for rows in (1, 64, 2048)
    if values in (None, "mxfp4") or (name == "Qwen3" and rows != 1)
}


def check(gpu: str, cases: dict[str, dict[str, Any]]) -> None:
    results = compile_for(gpu, experts=cases)
    for name, case in cases.items():
        facts = results[f"{name}, experts"]
        assert facts["error"] is None, name
        assert all(kernel["spill_bytes"] < 32 for kernel in facts["code"].values()), name
        assert not facts["control_flow"], f"{name}: the host waits for a predicate"
        pairs = case["rows"] * case["per_token"]
        rows_bytes = pairs * 2 * (3 * case["ffn_size"] + 2 * case["hidden_size"])
        is_unpacked = bool(case.get("values")) and pairs // case["num_experts"] >= MOST_ROWS
        assert (facts["kernels"] > 2) if is_unpacked else (facts["kernels"] == 2), name
        unpacked_bytes = MOST_UNPACKED_BYTES if is_unpacked else 0
        assert facts["temp_bytes"] < rows_bytes + unpacked_bytes + 2**21, f"{name}: rows, in and out of both products"


def test_experts_of_a_step_are_multiplied_where_they_lie() -> None:
    check("h100", SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_experts_of_any_kind_are_multiplied_where_they_lie(gpu: str) -> None:
    check(gpu, {name: case for name, case in EVERY.items() if gpu == "h100" or case["values"] != "e4m3"})
