"""The GPU bill: what is read of dumps, what is predicted from it, and the budgets of a sample compiled for an H100."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError
from benchmarks.gpu_bill.assumptions import assumed
from benchmarks.gpu_bill.bill import make_bill
from benchmarks.gpu_bill.budgets import broken, budgets
from benchmarks.gpu_bill.cases import Case, sample_case
from benchmarks.gpu_bill.kernel_time import Device
from benchmarks.gpu_bill.machine_code import Kernel
from benchmarks.gpu_bill.multiprocessor import multiprocessor
from benchmarks.gpu_bill.prediction import ModelBytes, Step, predict
from benchmarks.gpu_bill.program import NO_TRAFFIC, Program
from benchmarks.gpu_bill.reading import Reading
from benchmarks.gpu_bill.thunks import Thunk, parse_thunks

DUMP = """\
001: kCustomKernel [source | next=009 (1)] first grid: [2, 3, 1] threads: [128, 1, 1]  shared_memory: 64 bytes
009: kConditional  [prev=001 (1) | sink]
  false_branch:
    002: kCopy [source | sink] kCopy
  true_branch:
    000: kCommandBuffer [source | sink]
        003: kCustomKernel [source | sink] second grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
    004: kWhile [source | sink]
condition:
        005: kCustomKernel [source | sink] third grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        006: kCustomKernel [source | sink] fourth grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""
PROGRAM = """\
%fused (param_0: bf16[100,4], param_1: bf16[2,4], param_2: s32[2,1]) -> bf16[100,4] {
  %param_0 = bf16[100,4]{1,0} parameter(0)
  %param_1 = bf16[2,4]{1,0} parameter(1)
  %param_2 = s32[2,1]{1,0} parameter(2)
  ROOT %scatter.1 = bf16[100,4]{1,0} scatter(%param_0, %param_2, %param_1), to_apply=%region
}
ENTRY %main (pages: bf16[100,4], rows: bf16[2,4], index: s32[2,1]) -> bf16[100,4] {
  %pages = bf16[100,4]{1,0} parameter(0), metadata={op_name="layers[0]"}
  %rows = bf16[2,4]{1,0} parameter(1)
  %index = s32[2,1]{1,0} parameter(2)
  ROOT %write = bf16[100,4]{1,0} fusion(%pages, %rows, %index), kind=kInput, calls=%fused
}
"""
MODEL = ModelBytes(
    weights=int(16e9), kv_per_token=131_072, num_layers=32, num_kv_heads=8, layers_per_call=32, tile_tokens=64
)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    try:
        return make_bill([sample_case()])
    except PluginMissingError as error:
        pytest.skip(str(error))


def test_aot_the_sample_keeps_every_budget(bill: dict[str, Any]) -> None:
    assert broken(bill["executables"], budgets()) == []
    tight = [{"kind": "layers", "kernels_per_layer": 1, "spill_bytes": 0}]
    sentences = broken(bill["executables"], tight)
    assert "layers 64 2 with cuBLAS: kernels_per_layer is" in sentences[0]


def test_aot_the_sample_has_every_kind_of_executable_and_predicted_steps_above_the_roofline(
    bill: dict[str, Any],
) -> None:
    kinds = {row["executable"].split()[0] for row in bill["executables"]}
    assert {"embed", "layers", "head", "sample", "gather", "scatter"} <= kinds
    decode = [row for row in bill["kernels"] if row["kernel"] == "paged_decode_attention"]
    assert all(row["tensor_instructions"] and row["wide_loads"] and row["registers"] for row in decode)
    assert bill["steps"]
    assert all(1 < row["ratio"] < 3 for row in bill["steps"])


def test_thunks_are_read_with_their_branches_loops_and_launches() -> None:
    root = parse_thunks(DUMP, {1: "fusion.1"})
    first, conditional = root.children
    assert (first.kernel, first.instruction, first.blocks, first.threads, first.shared_bytes) == (
        "first",
        "fusion.1",
        6,
        128,
        64,
    )
    assert [(child.kind, child.label) for child in conditional.children] == [
        ("kCopy", "false_branch"),
        ("kCommandBuffer", "true_branch"),
        ("kWhile", "true_branch"),
    ]
    assert [child.label for child in conditional.children[2].children] == ["condition", "body"]


def test_a_step_takes_the_cheapest_branch_and_waits_for_its_predicate() -> None:
    found = Reading(Case("h100", "llama-3-8b", 64, 64), ("sample", "64"), None, thunks=parse_thunks(DUMP, {}))
    assert [launch.thunk.kind for launch in found.path(32)] == ["kCustomKernel", "kCopy"]
    assert found.waits(32) == 1


def test_an_update_in_place_makes_and_reads_only_its_rows() -> None:
    traffic = Program(PROGRAM, first_dim=100).traffic("write")
    assert (traffic.read, traffic.made, traffic.pages, traffic.copied) == (16 + 8, 16, True, 0)


def test_blocks_at_once_are_bounded_by_registers_and_by_shared_memory() -> None:
    h100 = multiprocessor("h100")
    assert h100.blocks(threads=128, registers=102, shared_bytes=39_424) == 4
    assert h100.blocks(threads=256, registers=170, shared_bytes=98_560) == 1


def step(kernel: Kernel, blocks: int, conditionals: int) -> Step:
    """A step whose layers are one product, with so many conditionals in its sampler."""
    case = Case("h100", "llama-3-8b", 1, 1)
    product = Thunk("kCustomKernel", kernel="product", blocks=blocks, threads=128)
    weights = NO_TRAFFIC._replace(read=500_000_000, weight=500_000_000, arguments=(("weights", 500_000_000),))
    readings = [Reading(case, ("layers", "1", "1"), None, thunks=Thunk("kSequential", children=[product]))]
    readings[0].traffic[id(product)], readings[0].kernels["product"] = weights, kernel
    waiting = Thunk("kSequential", children=[Thunk("kConditional") for _ in range(conditionals)])
    readings += [Reading(case, (kind, "1", "1"), None) for kind in ("embed", "head")]
    readings.append(Reading(case, ("sample", "1"), None, thunks=waiting))
    return predict(readings, Device(multiprocessor("h100"), assumed("h100")), MODEL, 1, 1000)


def test_a_predicted_step_is_longer_with_few_blocks_narrow_loads_and_conditionals() -> None:
    wide = Kernel(registers=32, load_bytes=16.0, loads=8)
    best = step(wide, 2112, 0)
    assert step(wide, 16, 0).seconds > 2 * best.seconds
    assert step(replace(wide, load_bytes=2.0), 528, 0).seconds > best.seconds
    assert step(wide, 2112, 1).host > best.host
