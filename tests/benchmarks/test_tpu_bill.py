"""The TPU bill: what is read of a program, and the budgets of a sample that is compiled for a v5e. No TPU runs."""

import pytest

from benchmarks.ahead_of_time.plugin import PluginMissingError
from benchmarks.gpu_bill.budgets import broken
from benchmarks.tpu_bill.bill import budgets, make_bill
from benchmarks.tpu_bill.cases import TPUS, Case, default_cases, sample_cases
from benchmarks.tpu_bill.program import read_program

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


def check(cases: list[Case]) -> None:
    try:
        bill = make_bill(cases)
    except PluginMissingError as error:
        pytest.skip(str(error))
    assert bill["executables"]
    assert broken(bill["executables"], budgets()) == []


def test_a_sample_compiled_for_a_v5e_keeps_its_budgets():
    check(sample_cases())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tpu", TPUS)
def test_every_case_compiled_keeps_its_budgets(tpu: str):
    check(default_cases([tpu]))
