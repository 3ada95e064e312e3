"""Reads kernels: registers, spills and shared memory from `ptxas -v`, loads and products from PTX, the rest from `nvdisasm`."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
LOAD = re.compile(
    r"\bld\.global(?P<modifiers>[\w.:]*)|\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (?P<bytes>0x\w+|\d+)"
)
PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)")
PROPERTIES = re.compile(
    r"Function properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (\d+) registers([^\n]*)"
)
SHARED = re.compile(r"(\d+) bytes smem")
SASS = {
    "tensor_instructions": re.compile(r"\b(?:HMMA|HGMMA)\."),
    "wide_loads": re.compile(r"\b(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128\b|\bUTMALDG\b"),
    "atomics": re.compile(r"\b(?:ATOMG|ATOM|REDG|RED)\."),
    "compare_and_swaps": re.compile(r"\bATOMG?\.E\.(?:\w+\.)*CAS|\bATOMG?\.CAS"),
    "two_byte_accesses": re.compile(r"\b(?:LDG|STG|LD|ST)\.E\.(?:\w+\.)*U16\b"),
}
SASS_LINE = re.compile(r"^\s*(?:(?P<label>\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?P<code>[^;]+);)", re.MULTILINE)
BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")


@dataclass
class Kernel:
    """What is read of one kernel.

    Attributes:
        registers: of a thread.
        spill_bytes: stored and loaded.
        shared_bytes: static; a launch may add to them.
        load_bytes: the mean width of a load from global memory, in bytes.
        loads: instructions that load from global memory.
        has_products: whether tensor cores multiply.
        sass: counts of instructions, as `SASS` names them; empty if it was not disassembled.
    """

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    load_bytes: float = 0.0
    loads: int = 0
    has_products: bool = False
    sass: dict[str, int] | None = None


def read_kernels(folder: Path, ptxas: str, nvdisasm: str, disassembled: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The kernels of an executable by name, from the PTX in XLA's dump.

    Args:
        ptxas, nvdisasm: the programs.
        disassembled: names of the kernels whose machine code is read too.
    """
    kernels: dict[str, Kernel] = {}
    wanted = set(disassembled)
    for path in folder.glob("*.ptx"):
        text = path.read_text()
        own_kernels = _of_ptx(text)
        with tempfile.TemporaryDirectory() as scratch:
            cubin = Path(scratch) / "kernel.cubin"
            arch = next(iter(TARGET.findall(text)))
            report = _run(ptxas, "-v", f"-arch={arch}", str(path), "-o", str(cubin))
            for name, stores, loads, registers, rest in PROPERTIES.findall(report):
                kernel = own_kernels.setdefault(name, Kernel())
                kernel.registers, kernel.spill_bytes = int(registers), int(stores) + int(loads)
                kernel.shared_bytes = int(shared[1]) if (shared := SHARED.search(rest)) else 0
            if wanted & own_kernels.keys():
                _count(own_kernels, _run(nvdisasm, "-c", str(cubin)))
        kernels |= own_kernels
    return {name: asdict(kernel) for name, kernel in kernels.items()}


def products_loop(ptx: Path, ptxas: str, nvdisasm: str) -> list[str]:
    """The machine instructions of the loop with the most products of tensor cores, in a file of one kernel."""
    with tempfile.TemporaryDirectory() as scratch:
        cubin = Path(scratch) / "kernel.cubin"
        _run(ptxas, f"-arch={TARGET.findall(ptx.read_text())[0]}", str(ptx), "-o", str(cubin))
        lines = SASS_LINE.finditer(_run(nvdisasm, "-c", str(cubin)))
    code, labels, loops = list[str](), dict[str, int](), list[list[str]]()
    for line in lines:
        if line["label"]:
            labels[line["label"]] = len(code)
            continue
        code.append(line["code"])
        if (branch := BRANCH.search(line["code"])) and branch[1] in labels:
            loops.append(code[labels[branch[1]] :])
    return max(loops, key=lambda loop: (sum(map(is_product, loop)), -len(loop)))


def is_product(instruction: str) -> bool:
    """Whether an instruction is a product of tensor cores."""
    return bool(SASS["tensor_instructions"].search(instruction))


def _of_ptx(text: str) -> dict[str, Kernel]:
    """Loads and products of the kernels in one file."""
    kernels: dict[str, Kernel] = {}
    starts = [*ENTRY.finditer(text)]
    for number, start in enumerate(starts):
        body = text[start.end() : starts[number + 1].start() if number + 1 < len(starts) else None]
        widths = [_width(load) for load in LOAD.finditer(body)]
        mean = sum(widths) / len(widths) if widths else 0.0
        kernels[start[1]] = Kernel(load_bytes=mean, loads=len(widths), has_products=bool(PRODUCT.search(body)))
    return kernels


def _width(load: re.Match[str]) -> int:
    """Bytes that a thread loads at once."""
    if load["bytes"]:
        return int(load["bytes"], 0)
    modifiers = load["modifiers"]
    vector = re.search(r"\.v(\d)", modifiers)
    bits = re.search(r"\.[bufs](\d+)$", modifiers)
    return (int(vector[1]) if vector else 1) * (int(bits[1]) if bits else 32) // 8


def _count(kernels: dict[str, Kernel], sass: str) -> None:
    """Put the counts of instructions into the kernels of a disassembly."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+)", sass, flags=re.MULTILINE)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in kernels:
            kernels[name].sass = {count_name: len(pattern.findall(body)) for count_name, pattern in SASS.items()}


def _run(*command: str) -> str:
    """What a program prints, on both streams."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
