"""Reads an executable's optimised HLO: launches, kernels, copies within memory and onto the chip, exchanges, host traffic."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

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
