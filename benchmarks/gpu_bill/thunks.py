"""Reads XLA's dump of thunks: what an executable launches, in order, with its branches and loops. Knows no arrays."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
