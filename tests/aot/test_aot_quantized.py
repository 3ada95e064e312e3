"""Products with quantised weights, compiled for A100 and H100 without a GPU: the weight is never unpacked in memory."""

from typing import Any

import pytest

from jinfercept.pallas.triton_quantized import MOST_ROWS
from tests.aot.cuda import compile_for

INPUTS, OUTPUTS = 4096, 14336
UNPACKED = 2 * INPUTS * OUTPUTS
CASES: dict[str, dict[str, Any]] = {
    f"{bits} bits, {rows} rows": {"rows": rows, "inputs": INPUTS, "outputs": OUTPUTS, "bits": bits}
    for bits in (4, 8)
    for rows in (1, 64, MOST_ROWS, 2 * MOST_ROWS)
}
FLOAT8: dict[str, dict[str, Any]] = {
    f"{name} of e4m3": case | {"values": "float8_e4m3fn"} for name, case in CASES.items() if case["bits"] == 8
}


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_up_to_so_many_rows_no_product_makes_a_copy_of_its_weight(gpu: str) -> None:
    cases = CASES | (FLOAT8 if gpu == "h100" else {})
    for name, facts in compile_for(gpu, quantized=cases).items():
        assert facts["error"] is None, name
        if cases[name]["rows"] <= MOST_ROWS:
            assert facts["kernels"] == 1, name
            assert facts["temp_bytes"] < UNPACKED / 8, f"{name}: sums of parts, and the rows in another order"
        else:
            assert facts["kernels"] == 0, name
            assert facts["made"][0][0] == UNPACKED, "XLA unpacks the weight"
