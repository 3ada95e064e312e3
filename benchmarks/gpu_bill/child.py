"""Run as a program where the CUDA plugin is on the path: compiles the bill's executables for one GPU and reads them.

Takes the order `{"gpu", "generation", "ptxas", "nvdisasm", "cases": [[gpu, model, …], …]}`, see `compile_order`.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ahead_of_time.compiler import TARGETS, CaseCompiler, Compiler, Facts, add_runner, compile_order, gpus
from benchmarks.gpu_bill.cases import NUM_PAGES, PAGE_SIZE, Case
from benchmarks.gpu_bill.machine_code import read_kernels
from benchmarks.gpu_bill.program import Program, Thunk, read_thunks
from jinfercept.pallas.gpu_kernels import available_attention
from jinfercept.pallas.tiles import Heads
from jinfercept.runner.packing import CommonShape
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.shape import RunnerShape

HERE = Path(__file__).parent
SOURCE = "".join((HERE / f"{name}.py").read_text() for name in ("child", "machine_code", "program"))
DUMPED = {"xla_dump_emitter_re": "ptx"}
OURS = "paged_"


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


def add_case(compiler: Compiler, case: Case) -> None:
    """Add the executables of a case."""
    num_layers = case.num_layers
    config = replace(case.config, num_layers=num_layers, kinds=case.config.kinds[:num_layers])
    shape = RunnerShape(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_num_seqs=case.max_num_seqs,
        max_model_len=case.max_model_len,
        buckets=(case.bucket,),
        layers_per_step=num_layers,
        num_window_pages=NUM_PAGES if config.kinds else 0,
    )
    adding: Any = CaseCompiler(compiler, case, case.compiles, {"xla_gpu_enable_triton_gemm": case.triton_products})
    heads = Heads(
        config.num_heads // case.num_devices, config.num_kv_heads // case.num_devices, config.head_dim, itemsize=2
    )
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        attention = available_attention(jnp.bfloat16, jnp.bfloat16, heads, PAGE_SIZE)[0]
    layers = add_runner(adding, config, shape, attention)
    if case.transfers:
        sizes = transfer_sizes("gpu")
        add_transfers(adding, layers, sizes, 1, CommonShape(shape.sample_rows[-1], sizes[0]))


def begin(order: Mapping[str, Any]) -> list[Compiler]:
    """Begin to compile the cases of an order."""
    cases = [Case(*case) for case in order["cases"]]
    reading = partial(read, order["ptxas"], order["nvdisasm"])
    counts = dict.fromkeys(case.num_devices for case in cases)
    compilers = {n: Compiler(gpus(order["gpu"], order["generation"], n), reading, SOURCE, DUMPED) for n in counts}
    for case in cases:
        add_case(compilers[case.num_devices], case)
    return list(compilers.values())


if __name__ == "__main__":
    compile_order(begin, *TARGETS.glob("*.txtpb"))
