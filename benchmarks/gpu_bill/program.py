"""Reads XLA's dumps of an executable: what it launches, in order, and the bytes that each instruction reads and makes.

An instruction reads every operand once, and only the rows in use of what it gathers from or slices; it makes its results, and
only the rows in use of what it updates in place. Pages of KV that attention reads depend on the step, and are left out here.
Knows no kernels and no arrays.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
OPERAND = re.compile(r"%([\w.-]+)(?:#(\d+))?")
PARAMS = re.compile(r'op_name="(?:params|weights|leaves)')
VIEWS = {"bitcast", "reshape", "get-tuple-element", "copy-done"}
SLICING = {"gather", "dynamic-slice", "slice"}
UPDATING = {"dynamic-update-slice", "scatter"}
LEAST_WEIGHT_BYTES = 1 << 20
"""Smaller parameters are norms and biases."""


class Instruction(NamedTuple):
    """An instruction of a program.

    Attributes:
        sizes: bytes of its results.
        operands: names, each with the number of the result that is meant.
        calls: the name of the computation that a fusion runs.
        rest: everything behind the operands.
    """

    name: str
    opcode: str
    sizes: tuple[int, ...]
    operands: tuple[tuple[str, int | None], ...]
    calls: str
    arguments: str
    rest: str
    is_root: bool


class Traffic(NamedTuple):
    """The bytes of one instruction.

    Attributes:
        read, made: of its operands and results.
        weight: of the weights among the operands, of those that are not sliced.
        copied: of a copy as large as a weight or as the pages; 0 for all else.
        pages: whether pages of KV are written, gathered from or read.
        arguments: names and bytes of those operands that are arguments of the executable, or of a branch.
        is_result: whether the executable, or a branch, has it as a result.
        row_share: the part of the rows that each number of the weight multiplies.
    """

    read: int
    made: int
    weight: int
    copied: int
    pages: bool
    arguments: tuple[tuple[str, int], ...]
    is_result: bool
    row_share: float = 1.0


NO_TRAFFIC = Traffic(0, 0, 0, 0, False, (), False)


class Program:
    """A program's instructions by name, and those of its computations.

    Args:
        text: the optimised program.
        first_dim: pages of a pool, by which a layer's pages are known among the arrays.
    """

    def __init__(self, text: str, first_dim: int) -> None:
        pools = re.findall(rf"\b([a-z]+\d+)\[({first_dim},[\d,]+)\]", text)
        self._pools = {_bytes(*array) for array in set(pools)}
        self.computations: dict[str, list[Instruction]] = {}
        self.instructions: dict[str, Instruction] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if line.endswith("{") and (match := re.match(r"^(?:ENTRY )?%(\S+) \(", line)):
                current = self.computations.setdefault(match[1], [])
            elif match := INSTRUCTION.match(line):
                current.append(_instruction(*match.groups()))
                self.instructions[match[2]] = current[-1]
        roots = [instruction for inside in self.computations.values() for instruction in inside if instruction.is_root]
        ends = [
            name for root in roots for name, _ in (root.operands if root.opcode == "tuple" else ((root.name, None),))
        ]
        self._results = {self._source(name)[0].name for name in ends if name in self.instructions}

    def traffic(self, name: str) -> Traffic:
        """The bytes of one instruction."""
        instruction = self.instructions[name]
        inside = self.computations.get(instruction.calls, [])
        read = weight = copyable = 0
        arguments: dict[str, int] = {}
        pages = not self._pools.isdisjoint(instruction.sizes)
        for number, (operand, part) in enumerate(dict.fromkeys(instruction.operands)):
            size, (source, place) = self._size(operand, part), self._source(operand)
            is_pool = size in self._pools
            pages |= is_pool
            sliced = (
                _sliced_bytes(inside, number) if instruction.opcode == "fusion" else _sliced_alone(instruction, number)
            )
            before = read
            if sliced is not None:
                read += sliced
            elif not (is_pool and "custom-call" in {instruction.opcode, *(part.opcode for part in inside)}):
                read += size
                is_weight = PARAMS.search(source.rest) is not None and size >= LEAST_WEIGHT_BYTES
                weight += size if is_weight else 0
                copyable = max(copyable, size) if is_weight or is_pool else copyable
            if source.opcode == "parameter":
                arguments[f"{source.name}{place}"] = read - before
        made = self._made(instruction, inside)
        copied = made if copyable and made >= copyable else 0
        return Traffic(read, made, weight, copied, pages, tuple(arguments.items()), name in self._results)

    def _made(self, instruction: Instruction, inside: Sequence[Instruction]) -> int:
        if instruction.opcode == "custom-call" and "matmul" in instruction.rest:
            return instruction.sizes[0]  # the others are room to work in
        if instruction.opcode == "custom-call" and "output_to_operand_aliasing" in instruction.rest:
            return sum(size for size in instruction.sizes if size not in self._pools)
        if instruction.opcode in UPDATING:
            return self._size(*instruction.operands[_update(instruction)])
        by_name = {instruction.name: instruction for instruction in inside}
        root = next((instruction for instruction in inside if instruction.is_root), None)
        if root is None:
            return sum(instruction.sizes)
        results = [name for name, _ in root.operands] if root.opcode == "tuple" else [root.name]
        return sum(_made_inside(by_name, name) for name in results)

    def _size(self, name: str, part: int | None) -> int:
        sizes = self.instructions[name].sizes
        return sizes[part] if part is not None else sum(sizes)

    def _source(self, name: str) -> tuple[Instruction, str]:
        """What a name views, and which part of it."""
        instruction, place = self.instructions[name], ""
        while instruction.opcode in VIEWS and instruction.operands:
            if instruction.opcode == "get-tuple-element":
                place = f" {instruction.rest[:12]}"
            instruction = self.instructions[instruction.operands[0][0]]
        return instruction, place


def _instruction(root: str | None, name: str, kind: str, opcode: str, rest: str) -> Instruction:
    arguments, _, rest = rest.partition(")")
    calls = re.search(r"calls=%([\w.-]+)", rest)
    operands = tuple((match[1], int(match[2]) if match[2] else None) for match in OPERAND.finditer(arguments))
    sizes = tuple(_bytes(dtype, dims) for dtype, dims in ARRAY.findall(kind))
    return Instruction(name, opcode, sizes, operands, calls[1] if calls else "", arguments, rest, root is not None)


def _bytes(dtype: str, dims: str) -> int:
    digits = re.search(r"\d+", dtype)
    return prod(int(size) for size in dims.split(",") if size) * (int(digits[0]) if digits else 8) // 8


def _sliced_bytes(inside: Sequence[Instruction], number: int) -> int | None:
    """Bytes that a fusion reads of a parameter from which it only slices, or which it updates in place; None of all others."""
    names = {
        instruction.name
        for instruction in inside
        if instruction.opcode == "parameter" and instruction.arguments.strip() == str(number)
    }
    total = 0
    used = False
    for instruction in inside:
        mine = [place for place, (name, _) in enumerate(instruction.operands) if name in names]
        if not mine:
            continue
        if instruction.opcode in VIEWS:
            names.add(instruction.name)
        elif instruction.opcode in SLICING | UPDATING and mine == [0]:
            total, used = total + (sum(instruction.sizes) if instruction.opcode in SLICING else 0), True
        else:
            return None
    return total if used else None


def _sliced_alone(instruction: Instruction, number: int) -> int | None:
    if number or instruction.opcode not in SLICING | UPDATING:
        return None
    return sum(instruction.sizes) if instruction.opcode in SLICING else 0


def _update(instruction: Instruction) -> int:
    """The place of the rows among the operands of an update."""
    return 1 if instruction.opcode == "dynamic-update-slice" else 2


def _made_inside(by_name: Mapping[str, Instruction], name: str) -> int:
    """Bytes of one result of a fusion; of an update in place, those of its rows."""
    instruction = by_name[name]
    while instruction.opcode in VIEWS and instruction.operands[0][0] in by_name:
        instruction = by_name[instruction.operands[0][0]]
    if instruction.opcode in UPDATING:
        return sum(by_name[instruction.operands[_update(instruction)][0]].sizes)
    return sum(by_name[name].sizes)


LINE = re.compile(r"^(\s*)(\d+): (k\w+)\s+\[[^\]]*\]\s*(.*)$")
LABEL = re.compile(r"^\s*(\w+):\s*$")
LAUNCH = re.compile(r"^(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")
PLACE = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
COLLECTIVES = ("kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll", "kCollectivePermute")
MATRIX_LIBRARIES = ("kCublasLtMatmul", "kGemm", "kCuDnn")


@dataclass
class Thunk:
    """One step of an executable.

    Attributes:
        kind: XLA's, as `kCustomKernel`, `kCopy`, `kConditional`, `kCommandBuffer`.
        instruction: of the optimised program; empty for what has none.
        label: the branch of the parent that it belongs to, as `true_branch`, `body`.
        kernel: the name of its machine code; empty if it has none.
        blocks, threads, shared_bytes: of the launch; the bytes are those that the launch adds.
        children: of command buffers, branches and loops.
    """

    kind: str
    instruction: str = ""
    label: str = ""
    kernel: str = ""
    blocks: int = 0
    threads: int = 0
    shared_bytes: int = 0
    children: "list[Thunk]" = field(default_factory=list)

    def walk(self) -> "Iterator[Thunk]":
        """This one and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_thunks(folder: Path) -> Thunk:
    """The sequence of an executable from XLA's dump. An executable without passes over its thunks has the first dump alone."""
    names = ("*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt")
    sequence = next(path for name in names for path in folder.glob(name))
    places = PLACE.findall(next(folder.glob("*.thunk_metadata.txt")).read_text())
    return parse_thunks(sequence.read_text(), {int(number): name for name, number in places})


def parse_thunks(text: str, instructions: dict[int, str]) -> Thunk:
    """The sequence in a dump, by indentation; headings of loops are not indented and belong to what follows.

    Args:
        instructions: of the program, by thunk.
    """
    root = Thunk("kSequential")
    open_at: list[tuple[int, Thunk]] = [(-1, root)]
    labels: dict[int, str] = {}
    heading = ""
    for line in text.splitlines():
        if match := LABEL.match(line):
            heading = match[1]
        elif match := LINE.match(line):
            depth = len(match[1])
            while open_at[-1][0] >= depth:
                open_at.pop()
            parent = open_at[-1][1]
            if parent.kind == "kDynamicSliceFusion":
                continue  # the call that reads the slices
            if heading:
                labels[id(parent)], heading = heading, ""
            thunk = _thunk(match[3], match[4])
            thunk.label = labels.get(id(parent), "")
            thunk.instruction = instructions.get(int(match[2]), "") if match[3] != "kCommandBuffer" else ""
            parent.children.append(thunk)
            open_at.append((depth, thunk))
    return root


def _thunk(kind: str, rest: str) -> Thunk:
    launch = LAUNCH.match(rest)
    if launch is None:
        return Thunk(kind)
    x, y, z, wide, high, deep, shared = map(int, launch.groups()[1:])
    return Thunk(kind, kernel=launch[1], blocks=x * y * z, threads=wide * high * deep, shared_bytes=shared)
