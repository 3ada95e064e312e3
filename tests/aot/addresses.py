"""How a kernel forms addresses, read from its PTX: by how much a 32-bit number is scaled before it is added to a pointer."""

import re
from math import inf

STATEMENT = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]+);", re.MULTILINE)
REGISTER = re.compile(r"%rd?\d+")
ADDRESS = re.compile(r"\[\s*(%rd\d+)")
ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)


def address_scales(ptx: str) -> dict[str, float]:
    """The least bytes, of every kernel, that a step of a signed 32-bit number in an address stands for; infinite if none does.

    An offset of 2^31 times as many bytes wraps around.
    """
    starts = [*ENTRY.finditer(ptx)]
    ends = [start.start() for start in starts[1:]] + [len(ptx)] * bool(starts)
    return {start[1]: _least_scale(ptx[start.end() : end]) for start, end in zip(starts, ends, strict=True)}


def _least_scale(body: str) -> float:
    """Of the addresses in one kernel's body, which is read as sets of definitions: where they stand does not matter."""
    definitions: dict[str, list[tuple[str, list[str]]]] = {}
    roots = set[str]()
    for opcode, operands in STATEMENT.findall(body):
        if ".global" in opcode and (addresses := ADDRESS.findall(operands)):
            roots.add(addresses[-1])  # an asynchronous copy names shared memory first
        else:
            target, *sources = (operand.strip() for operand in operands.split(","))
            definitions.setdefault(target, []).append((opcode, sources))
    least, waiting, seen = inf, [(root, 1) for root in roots], set[tuple[str, int]]()
    while waiting:
        register, scale = place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        for opcode, sources in definitions.get(register, []):
            if opcode.startswith("mul.wide.s32"):
                least = min(least, scale * int(sources[1]) if sources[1].isdigit() else scale)
            elif opcode == "cvt.s64.s32":
                least = min(least, scale)
            elif opcode.startswith(("cvt.", "ld.", "mul.wide")):
                continue  # an unsigned number counts threads, a loaded one is a pointer
            else:
                grown = scale << int(sources[1]) if opcode == "shl.b64" else scale
                waiting += [(source, grown) for source in sources if REGISTER.fullmatch(source)]
    return least
