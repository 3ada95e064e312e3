"""Products with quantised weights, compiled for A100 and H100 without a GPU: the weight is never unpacked in memory.

The product of the GPU suite for Hopper takes few instructions."""

from typing import Any

import pytest

from jinfercept.pallas.triton_quantized import MOST_FLOAT8_ROWS, MOST_ROWS
from tests.aot.cuda import compile_for

INPUTS, OUTPUTS = 4096, 14336
UNPACKED = 2 * INPUTS * OUTPUTS


def case(bits: int, rows: int, values: str | None = None) -> tuple[str, dict[str, Any]]:
    sizes = {"rows": rows, "inputs": INPUTS, "outputs": OUTPUTS, "bits": bits}
    if values is None:
        return f"{bits} bits, {rows} rows", sizes
    return f"{bits} bits, {rows} rows of {values}", sizes | {"values": values}


FLOAT8 = "float8_e4m3fn"
SAMPLE = dict([case(4, 1), case(8, MOST_ROWS), case(8, MOST_FLOAT8_ROWS, FLOAT8), case(4, 2 * MOST_ROWS)])
A100 = dict(case(bits, rows) for bits in (4, 8) for rows in (1, 16, MOST_ROWS, 2 * MOST_ROWS))
H100 = A100 | dict(case(8, rows, FLOAT8) for rows in (1, MOST_FLOAT8_ROWS, 2 * MOST_FLOAT8_ROWS))


def check(gpu: str, cases: dict[str, dict[str, Any]]) -> None:
    for name, facts in compile_for(gpu, quantized=cases).items():
        assert facts["error"] is None, name
        if cases[name]["rows"] <= (MOST_FLOAT8_ROWS if "values" in cases[name] else MOST_ROWS):
            assert facts["kernels"] == 1, name
            assert facts["temp_bytes"] < UNPACKED / 4, f"{name}: sums of parts, and the rows in another order"
        else:
            assert facts["kernels"] == 0, name
            assert facts["made"][0][0] == UNPACKED, "XLA unpacks the weight"


def test_up_to_so_many_rows_no_product_makes_a_copy_of_its_weight() -> None:
    check("h100", SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "cases"), [("h100", H100), ("a100", A100)], ids=["h100", "a100"])
def test_no_product_of_any_kind_makes_a_copy_of_its_weight(gpu: str, cases: dict[str, dict[str, Any]]) -> None:
    check(gpu, cases)


NUMBERS_OF_A_THREAD = 64 * 16 // 128  # in one product of wgmma
MOST_INSTRUCTIONS = {"int4": 2.55, "int8": 2.4, FLOAT8: 3.5}


@pytest.mark.parametrize("rows", [1, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "grouped"), [("int4", True), ("int8", False), (FLOAT8, True)])
def test_weights_in_the_order_of_wgmma_take_few_instructions_and_no_spills(kind: str, grouped: bool, rows: int) -> None:
    sizes = {"rows": rows, "inputs": INPUTS, "outputs": OUTPUTS, "kind": kind, "grouped": grouped}
    (facts,) = compile_for("h100", fragments={f"{kind}, {rows} rows": sizes}).values()
    assert facts["error"] is None
    assert facts["mosaic_kernels"] == 1
    (report,) = facts["assembled"]
    assert "0 bytes spill stores" in report
    assert "serialized" not in report, "products wait for each other"
    ((instructions, products),) = facts["loops"]
    assert instructions / (products * NUMBERS_OF_A_THREAD) <= MOST_INSTRUCTIONS[kind]
