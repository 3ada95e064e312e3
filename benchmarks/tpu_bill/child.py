"""Run as a program where TPUs' library is on the path: compiles the bill's executables for TPUs that are not there.

Takes one JSON object from stdin, `{"cases": [[tpu, model, …], …]}`, and writes a JSON line to stdout for every executable as it
comes: `{"done", "total", "case", "key", "num_hosts", "reading"}`. With `"sources": true` a last line `{"sources": […]}` names
the files of the repository that it has read.
"""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from benchmarks.ahead_of_time.compiler import Compiler, Facts, add_runner, loaded_sources, tpus
from benchmarks.tpu_bill.cases import MAX_MODEL_LEN, NUM_PAGES, NUM_WINDOW_PAGES, PAGE_SIZE, Case, case_of
from benchmarks.tpu_bill.program import read_program
from jinfercept.runner.packing import CommonShape
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.shape import RunnerShape

HERE = Path(__file__).parent
SOURCE = "".join((HERE / f"{name}.py").read_text() for name in ("child", "program"))
STAGING_PAGES = 16
SEPARATOR = " | "


class CaseCompiler:
    """Adds a case's executables to a `Compiler`."""

    def __init__(self, compiler: Compiler, case: Case) -> None:
        self._compiler, self._case, self.mesh, self.shape = compiler, case, compiler.mesh, compiler.shape

    def add(self, key: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> None:
        words = [key] if isinstance(key, str) else list(map(str, key[:3]))
        if self._case.takes(words[0]):
            title = f"{json.dumps(self._case)}{SEPARATOR}{json.dumps(words)}"
            self._compiler.add(title, function, *arguments, donate=donate)


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
    adding: Any = CaseCompiler(compiler, case)
    layers = add_runner(adding, case.compiled_config, shape, "tpu")
    if case.takes("gather"):
        sizes = transfer_sizes("tpu", STAGING_PAGES)
        add_transfers(
            adding, layers, (sizes[0], STAGING_PAGES, 1), STAGING_PAGES, CommonShape(shape.sample_rows[-1], sizes[0])
        )


def main() -> None:
    order = json.load(sys.stdin)
    cases = list(map(case_of, order["cases"]))
    lines, done = sys.stdout, 0
    with redirect_stdout(sys.stderr):
        targets = dict.fromkeys((case.tpu, case.num_devices) for case in cases)
        compilers = {target: Compiler(tpus(*target), read, SOURCE) for target in targets}
        for case in cases:
            add_case(compilers[case.tpu, case.num_devices], case)
        total = sum(map(len, compilers.values()))
        for title, facts in chain.from_iterable(compiler.finished() for compiler in compilers.values()):
            done += 1
            case, _, key = title.partition(SEPARATOR)
            of = case_of(json.loads(case))
            devices = compilers[of.tpu, of.num_devices].mesh.devices.flat
            line = {"done": done, "total": total, "case": of, "key": json.loads(key), "reading": facts}
            line["num_hosts"] = len({device.process_index for device in devices})
            print(json.dumps(line), file=lines, flush=True)
        if order.get("sources"):
            print(json.dumps({"sources": loaded_sources()}), file=lines, flush=True)


if __name__ == "__main__":
    main()
