"""Run as a program where the CUDA plugin is on the path: compiles the bill's executables for one GPU and reads them.

Takes one JSON object from stdin, `{"gpu", "generation", "ptxas", "nvdisasm", "cases": [[gpu, model, …], …], "num_layers"}`, and
writes a JSON line to stdout for every executable as it comes: `{"done", "total", "case", "key", "reading"}`. With
`"sources": true` a last line `{"sources": […]}` names the files of the repository that it has read.
"""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ahead_of_time.compiler import TARGETS, Compiler, Facts, add_runner, gpus, loaded_sources
from benchmarks.gpu_bill.cases import NUM_PAGES, PAGE_SIZE, Case
from benchmarks.gpu_bill.machine_code import read_kernels
from benchmarks.gpu_bill.program import Program
from benchmarks.gpu_bill.thunks import Thunk, read_thunks
from jinfercept.pallas.gpu_heads import Heads
from jinfercept.pallas.gpu_kernels import available_attention
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.shape import RunnerShape

HERE = Path(__file__).parent
SOURCE = "".join((HERE / f"{name}.py").read_text() for name in ("child", "machine_code", "program", "thunks"))
DUMPED = {"xla_dump_emitter_re": "ptx"}
OURS = "paged_"
SEPARATOR = " | "


class CaseCompiler:
    """Adds a case's executables to a `Compiler`, with Triton products or without."""

    def __init__(self, compiler: Compiler, case: Case) -> None:
        self._compiler, self._case, self.mesh, self.shape = compiler, case, compiler.mesh, compiler.shape

    def add(self, key: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> None:
        words = [key] if isinstance(key, str) else list(map(str, key))
        if self._case.triton_products and words[0].split()[-1] not in ("layers", "head"):
            return  # without products it is the same
        options = {"xla_gpu_enable_triton_gemm": self._case.triton_products}
        title = f"{json.dumps(self._case)}{SEPARATOR}{json.dumps(words)}"
        self._compiler.add(title, function, *arguments, donate=donate, options=options)


def read(ptxas: str, nvdisasm: str, compiled: jax.stages.Compiled, folder: Path) -> Facts:
    """What is read of an executable."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    program = Program(text, first_dim=NUM_PAGES + 1)
    sequence = read_thunks(folder)
    launched = {thunk.kernel: program.traffic(thunk.instruction) for thunk in sequence.walk() if thunk.kernel}
    disassembled = {name for name, traffic in launched.items() if traffic.pages or name.startswith(OURS)}
    return {
        "error": None,
        "temp_bytes": memory.temp_size_in_bytes,
        "thunks": _described(sequence, program),
        "kernels": read_kernels(folder, ptxas, nvdisasm, disassembled),
    }


def _described(thunk: Thunk, program: Program) -> dict[str, Any]:
    """A thunk and those below it, with the bytes of their instructions."""
    described = asdict(replace(thunk, children=[]))
    if thunk.instruction in program.instructions and not thunk.children:
        described["traffic"] = program.traffic(thunk.instruction)._asdict()
    return described | {"children": [_described(child, program) for child in thunk.children]}


def add_case(compiler: Compiler, case: Case, num_layers: int) -> None:
    """Add the executables of a case."""
    config = replace(case.config, num_layers=num_layers)
    shape = RunnerShape(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_num_seqs=case.max_num_seqs,
        max_model_len=case.max_model_len,
        buckets=(case.bucket,),
        layers_per_step=num_layers,
    )
    adding: Any = CaseCompiler(compiler, case)
    heads = Heads(
        config.num_heads // case.num_devices, config.num_kv_heads // case.num_devices, config.head_dim, itemsize=2
    )
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        attention = available_attention(jnp.bfloat16, jnp.bfloat16, heads, PAGE_SIZE)[0]  # all layers are plain
    layers = add_runner(adding, config, shape, attention)
    if case.transfers:
        add_transfers(adding, layers, transfer_sizes("gpu"), 1, shape.sample_rows[-1])


def main() -> None:
    order = json.load(sys.stdin)
    cases = [Case(*case) for case in order["cases"]]
    lines, done = sys.stdout, 0
    with redirect_stdout(sys.stderr):
        reading = partial(read, order["ptxas"], order["nvdisasm"])
        counts = dict.fromkeys(case.num_devices for case in cases)
        compilers = {n: Compiler(gpus(order["gpu"], order["generation"], n), reading, SOURCE, DUMPED) for n in counts}
        for case in cases:
            add_case(compilers[case.num_devices], case, order["num_layers"])
        total = sum(map(len, compilers.values()))
        for title, facts in chain.from_iterable(compiler.finished() for compiler in compilers.values()):
            done += 1
            case, _, key = title.partition(SEPARATOR)
            line = {
                "done": done,
                "total": total,
                "case": json.loads(case),
                "key": json.loads(key),
                "reading": facts,
            }
            print(json.dumps(line), file=lines, flush=True)
        if order.get("sources"):
            print(json.dumps({"sources": loaded_sources(TARGETS / f"{order['gpu']}.txtpb")}), file=lines, flush=True)


if __name__ == "__main__":
    main()
