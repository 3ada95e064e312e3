"""Run as a program where TPUs' library is on the path: compiles the bill's executables for TPUs that are not there, and counts
launches, kernels, copies within memory and onto the chip, exchanges and host traffic in their optimised HLO.

Takes the order `{"cases": [[tpu, model, …], …]}`, see `compile_order`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.ahead_of_time.compiler import CaseCompiler, Compiler, Facts, add_runner, compile_order, tpus
from benchmarks.tpu_bill.cases import MAX_MODEL_LEN, NUM_PAGES, NUM_WINDOW_PAGES, PAGE_SIZE, Case, case_of
from jinfercept.runner.packing import CommonShape
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.shape import RunnerShape

LARGE_BYTES = 4 << 20
"""A copy in the device's memory that is counted: weights and pools have more, a step's rows less."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.+?) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
_FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "Sharding")
_COPIES = {"copy", "copy-start", "transpose", "slice-start", "reshape"}
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_HOST = {"send", "recv", "infeed", "outfeed"}
_ON_CHIP, _ON_HOST = "S(1)", "S(5)"
_BITS = re.compile(r"\d+")


class Instruction(NamedTuple):
    """One instruction of the entry, with the bytes and the layout of what it makes, or of the first array of that."""

    name: str
    opcode: str
    num_bytes: int
    layout: str
    text: str


def read_program(hlo: str) -> dict[str, Any]:
    """Counts of an executable's entry, ready for JSON."""
    entry = list(_instructions(hlo.split("\nENTRY ", 1)[1]))
    launched = [each for each in entry if _is_launched(each)]
    copies = [each for each in entry if each.opcode in _COPIES]
    large = [each for each in copies if _ON_CHIP not in each.layout and each.num_bytes >= LARGE_BYTES]
    return {
        "launches": len(launched),
        "kernels": sum('custom_call_target="tpu_custom_call"' in each.text for each in launched),
        "copies": sorted((f"{each.num_bytes >> 20} MiB {each.opcode} {each.name}" for each in large), reverse=True),
        "prefetched_bytes": sum(
            each.num_bytes for each in copies if each.opcode.endswith("-start") and _ON_CHIP in each.layout
        ),
        "collectives": Counter(_COLLECTIVE.findall(hlo)),
        "loops": sum(each.opcode in ("while", "conditional") for each in entry),
        "host_transfers": sum(each.opcode in _HOST or _ON_HOST in each.layout for each in entry),
    }


def _instructions(text: str) -> Iterator[Instruction]:
    for line in text.splitlines():
        if (matched := _INSTRUCTION.match(line)) is None:
            continue
        name, made, opcode = matched.groups()
        arrays = _ARRAY.findall(made) or [("", "", "")]
        dtype, dims, layout = arrays[min(1, len(arrays) - 1) if opcode == "slice-start" else 0]  # its operand is first
        yield Instruction(name, opcode, _bytes(dtype, dims), layout, line)


def _is_launched(instruction: Instruction) -> bool:
    opcode, text = instruction.opcode, instruction.text
    if opcode in _FREE or opcode.endswith(("-start", "-done", "-update")):
        return False
    return not (opcode == "custom-call" and any(f'custom_call_target="{name}"' in text for name in _FREE_CALLS))


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.search(dtype)
    count = math.prod(int(size) for size in dims.split(",") if size)
    return count * (int(bits[0]) if bits else 8) // 8 if dtype else 0


SOURCE = Path(__file__).read_text()
STAGING_PAGES = 16


def read(compiled: jax.stages.Compiled, _: Path) -> Facts:
    """What is read of an executable."""
    memory, text, cost = compiled.memory_analysis(), compiled.as_text(), compiled.cost_analysis()
    assert memory is not None
    assert text is not None
    return {
        "error": None,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "made_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "flops": (cost or {}).get("flops", 0.0),
        **read_program(text),
    }


def add_case(compiler: Compiler, case: Case) -> None:
    """Add the executables of a case."""
    windowed = any(kind.window for kind in case.compiled_config.kinds)
    shape = RunnerShape(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_num_seqs=min(case.bucket, 64),
        max_model_len=MAX_MODEL_LEN,
        buckets=(case.bucket,),
        layers_per_step=case.num_layers,
        num_window_pages=NUM_WINDOW_PAGES if windowed else 0,
        staging_pages=STAGING_PAGES,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    adding: Any = CaseCompiler(compiler, case, case.takes)
    layers = add_runner(adding, case.compiled_config, shape, "tpu")
    if case.takes("gather"):
        sizes = transfer_sizes("tpu", STAGING_PAGES)
        add_transfers(
            adding, layers, (sizes[0], STAGING_PAGES, 1), STAGING_PAGES, CommonShape(shape.sample_rows[-1], sizes[0])
        )


def begin(order: Mapping[str, Any]) -> list[Compiler]:
    """Begin to compile the cases of an order."""
    cases = list(map(case_of, order["cases"]))
    targets = dict.fromkeys((case.tpu, case.num_devices) for case in cases)
    compilers = {target: Compiler(tpus(*target), read, SOURCE) for target in targets}
    for case in cases:
        add_case(compilers[case.tpu, case.num_devices], case)
    return list(compilers.values())


if __name__ == "__main__":
    compile_order(begin)
