"""The TPU bill: what is read of a program, and the budgets of a sample that is compiled for a v5e. No TPU runs."""

from typing import Any

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError
from benchmarks.gpu_bill.budgets import broken, budgets
from benchmarks.tpu_bill import bill
from benchmarks.tpu_bill.bill import BUDGETS, Reading, executable_row, make_bill, step_row
from benchmarks.tpu_bill.cases import CHUNK, DEVICES, MODELS, ROWS, TPUS, Case, default_cases, sample_cases
from benchmarks.tpu_bill.child import read_program
from tests.support.kept_results import kept_lines

HOSTS = {**{(tpu, 8): 2 for tpu in ("v4", "v5e", "v5p", "v6e")}, ("v5e", 16): 4}
"""Of slices, by generation and JAX's devices: those that have more than one."""
FACTS: dict[str, Any] = {
    "error": None,
    "flops": 0.0,
    "argument_bytes": 0,
    "temp_bytes": 0,
    "made_bytes": 0,
    **read_program("\nENTRY "),
}
PROGRAM = """\
HloModule jit_step

ENTRY %main (a: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %copy-start = (bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,4096]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %copy.1 = bf16[4096,4096]{0,1:T(8,128)(2,1)} copy(%a)
  %copy.2 = bf16[64,64]{0,1:T(8,128)(2,1)} copy(%a)
  %attend = bf16[64,64]{1,0} custom-call(%copy.2), custom_call_target="tpu_custom_call"
  %sum = f32[64]{0} all-reduce(%attend)
  ROOT %fusion = bf16[4096,4096]{1,0:T(8,128)(2,1)S(5)} fusion(%copy.1), kind=kLoop
}
"""


def test_what_is_read_of_a_program():
    facts = read_program(PROGRAM)
    assert facts["copies"] == ["32 MiB copy copy.1"]
    assert (facts["launches"], facts["kernels"], facts["loops"], facts["host_transfers"]) == (5, 1, 0, 1)
    assert facts["prefetched_bytes"] == 2 * 4096 * 4096
    assert facts["collectives"] == {"all-reduce": 1}


@pytest.mark.parametrize("tpu", ["v4", "v5p", "v6e"])
def test_a_predicted_step_agrees_with_the_roofline_of_simulate(tpu: str):
    def step(model: str) -> dict[str, Any]:
        case = Case(tpu, model, ROWS, DEVICES[model])
        row = step_row(case, [Reading(case, (kind,), 1, FACTS) for kind in ("layers", "head")])
        assert row is not None
        return row

    alone, exchanging = step("llama-3-8b"), step("llama-3-70b")
    assert alone["least_ms"] < alone["roofline_ms"] < 1.05 * alone["least_ms"]
    assert exchanging["least_ms"] < exchanging["roofline_ms"] < 1.35 * exchanging["least_ms"], "exchanges take time"


def test_hosts_and_chips_of_every_generation_are_compiled_for():
    cases = default_cases()
    assert {case.tpu for case in cases} == set(TPUS)
    for tpu in TPUS:
        own = [case for case in cases if case.tpu == tpu]
        assert {case.model for case in own if case.bucket == ROWS and not case.kinds and not case.without} == set(
            MODELS
        )
        assert {case.model for case in own if case.bucket == CHUNK} == set(MODELS)
        assert {case.num_devices for case in own} >= {1, 4, 8}
    assert any(case.tpu == "v5e" and case.num_devices == 16 for case in cases)


def test_layers_without_their_kernels_break_a_budget():
    reading = Reading(Case("v6e", "qwen3-30b-a3b", ROWS, 4), ("layers", "64", "2"), 1, FACTS | {"kernels": 2})
    [sentence] = broken([executable_row(reading)], budgets(BUDGETS))
    assert "fallbacks is 6, and its budget 0" in sentence


def check(cases: list[Case]) -> None:
    try:
        made = make_bill(cases)
    except PluginMissingError as error:
        pytest.skip(str(error))
    assert made["executables"]
    assert all(row["num_hosts"] == HOSTS.get((row["tpu"], row["num_devices"]), 1) for row in made["executables"])
    assert broken(made["executables"], budgets(BUDGETS)) == []


def test_a_sample_compiled_for_a_v5e_keeps_its_budgets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bill, "_lines", kept_lines("tpu_bill", bill._lines))
    check(sample_cases())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tpu", TPUS)
def test_every_case_compiled_keeps_its_budgets(tpu: str):
    check(default_cases([tpu]))
