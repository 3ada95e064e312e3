"""The GPU bill: what is read of dumps, what is predicted from it, and the budgets of a sample compiled for an H100."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError
from benchmarks.gpu_bill import bill as making
from benchmarks.gpu_bill.assumptions import Assumptions, assumed
from benchmarks.gpu_bill.bill import make_bill, model_bytes
from benchmarks.gpu_bill.budgets import broken, budgets, rewritten
from benchmarks.gpu_bill.cases import MIXED, Case, StepSize, long_case, mixed_case, sample_case
from benchmarks.gpu_bill.kernel_time import Device, multiprocessor
from benchmarks.gpu_bill.machine_code import Kernel
from benchmarks.gpu_bill.prediction import AttentionSizes, ModelBytes, Step, predict
from benchmarks.gpu_bill.program import NO_TRAFFIC, Thunk, parse_thunks
from benchmarks.gpu_bill.reading import Reading
from tests.support.kept_results import kept_lines

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
MODEL = ModelBytes(
    weights=int(16e9),
    active=int(16e9),
    head=0,
    num_layers=32,
    layers_per_call=32,
    attention=(AttentionSizes(num_kv_heads=8, kv_per_token=4096, tile_tokens=64, pair_flops=16_384),),
)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "_lines", kept_lines("gpu_bill", making._lines))
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
    assert all(1 < row["ratio"] < 1.5 for row in bill["steps"])
    assert {row["gpu"] for row in bill["steps"]} == {"h100", "h200"}, "both run the same code"
    products = {row["product"]: row["reach"] for row in bill["products"]}
    assert products.keys() == {"qkv", "o", "gate_up", "down", "unembed"}
    assert max(products["o"], products["qkv"]) < products["down"] < products["gate_up"] == products["unembed"]


@pytest.mark.slow
def test_aot_contexts_of_131072_tokens_keep_every_budget_and_are_predicted() -> None:
    try:
        bill = make_bill([long_case()])
    except PluginMissingError as error:
        pytest.skip(str(error))
    assert broken(bill["executables"], budgets()) == []
    assert {(row["rows"], row["context"]) for row in bill["steps"]} == {(1, 131_000), (2, 131_000)}
    assert all(1 < row["ratio"] < 1.5 for row in bill["steps"])


@pytest.mark.slow
def test_aot_decode_rows_beside_a_chunk_are_predicted_with_the_kernels_for_both() -> None:
    try:
        bill = make_bill([mixed_case()])
    except PluginMissingError as error:
        pytest.skip(str(error))
    assert broken(bill["executables"], budgets()) == []
    assert {(row["gpu"], *(row[name] for name in MIXED._fields)) for row in bill["steps"]} == {
        ("h100", *MIXED),
        ("h200", *MIXED),
    }
    assert all(1 < row["ratio"] < 1.5 and row["default_buckets"] for row in bill["steps"])


def test_a_step_reads_the_experts_in_use_and_multiplies_with_those_of_a_row() -> None:
    case = Case("h100", "qwen3-30b-a3b", 1, 1)
    of_one, of_many = (model_bytes(case, rows) for rows in (1, 4096))
    assert of_one.weights == of_one.active == of_many.active
    assert of_many.weights - of_one.weights == pytest.approx(48 * 120 * 3 * 2 * 2048 * 768)
    assert 6.0e9 < of_one.active < 6.2e9


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
    reading = Reading(Case("h100", "llama-3-8b", 64, 64), ("sample", "64"), None, thunks=parse_thunks(DUMP, {}))
    assert [launch.thunk.kind for launch in reading.path(32)] == ["kCustomKernel", "kCopy"]
    assert reading.waits(32) == 1


def test_blocks_at_once_are_bounded_by_registers_and_by_shared_memory() -> None:
    h100 = multiprocessor("h100")
    assert h100.blocks(threads=128, registers=102, shared_bytes=39_424) == 4
    assert h100.blocks(threads=256, registers=170, shared_bytes=98_560) == 1


def step(kernel: Kernel, blocks: int, conditionals: int, *, assumptions: Assumptions | None = None) -> Step:
    """A step whose layers are one product, with so many conditionals in its sampler."""
    case = Case("h100", "llama-3-8b", 1, 1)
    product = Thunk("kCustomKernel", kernel="product", blocks=blocks, threads=128)
    weights = NO_TRAFFIC._replace(read=500_000_000, weight=500_000_000, arguments=(("weights", 500_000_000),))
    readings = [Reading(case, ("layers", "1", "1"), None, thunks=Thunk("kSequential", children=[product]))]
    readings[0].traffic[id(product)], readings[0].kernels["product"] = weights, kernel
    waiting = Thunk("kSequential", children=[Thunk("kConditional") for _ in range(conditionals)])
    readings += [Reading(case, (kind, "1", "1"), None) for kind in ("embed", "head")]
    readings.append(Reading(case, ("sample", "1"), None, thunks=waiting))
    return predict(readings, Device(multiprocessor("h100"), assumptions or assumed("h100")), MODEL, StepSize(1, 1000))


def test_a_predicted_step_is_longer_with_few_blocks_narrow_loads_and_conditionals() -> None:
    wide = Kernel(registers=32, load_bytes=16.0, loads=8)
    best = step(wide, 2112, 0)
    assert step(wide, 16, 0).seconds > 2 * best.seconds
    assert step(replace(wide, load_bytes=2.0), 528, 0).seconds > best.seconds
    assert step(wide, 2112, 1).host > best.host


def test_a_step_waits_for_its_upload_and_for_graphs_recorded_anew_that_no_compute_hides() -> None:
    wide, likely = Kernel(registers=32, load_bytes=16.0, loads=8), assumed("h100")
    usual = step(wide, 2112, 0)
    assert usual.uploads == likely.upload_bubble
    assert usual.update_work == pytest.approx(0.5 * MODEL.num_layers * likely.graph_update)
    assert usual.updates == 0
    slow = step(wide, 2112, 0, assumptions=replace(likely, graph_update=1e-3))
    assert 0 < slow.updates < slow.update_work
    assert slow.seconds - usual.seconds == pytest.approx(slow.updates + slow.host - usual.host)


def test_budgets_are_rewritten_with_what_was_compiled() -> None:
    text = '[[budget]] # any\nkind = "layers"\nkernels = 9\ncopies = 0\n\n[[budget]]\nbucket = 64\nkernels = 7 # few\n'
    row = {"num_devices": 1, "gpu": "h100", "model": "m", "library": "cuBLAS", "executable": "layers", "kind": "layers"}
    rows = [row | {"bucket": size, "kernels": count, "copies": 0} for size, count in ((1, 5.0), (8, 6.5), (64, 8.0))]
    written = rewritten(text, rows)
    assert written == text.replace("kernels = 9", "kernels = 6.5").replace("kernels = 7 #", "kernels = 8 #")
    assert rewritten(text, [row | {"bucket": 1, "error": "none"}]) == text
