"""Compiles functions for devices that are not there, all at once, and keeps what was read of each between runs.

Runs where the devices' compiler is on the path, see `plugin.environment`. What is read of an executable is its user's choice.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.extend.source_info_util import register_exclusion
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.ahead_of_time.plugin import PROJECT
from jinfercept.models.config import ModelConfig
from jinfercept.models.gemma4 import fitted
from jinfercept.models.mesh import EVERYWHERE
from jinfercept.models.model import Model, abstract_params
from jinfercept.models.parallel import AXIS
from jinfercept.models.protocol import Params
from jinfercept.models.sharding import partition_specs
from jinfercept.runner.draft_layer import Assistant
from jinfercept.runner.executables import COMPILER_OPTIONS
from jinfercept.runner.packing import CommonShape
from jinfercept.runner.page_transfers import GPU_TRANSFERS, add_transfers
from jinfercept.runner.pools import pool_shapes
from jinfercept.runner.shape import RunnerShape
from jinfercept.runner.steps import add_steps

TARGETS = Path(__file__).parent / "targets"
TPU_SLICES: Mapping[str, tuple[tuple[int, str], ...]] = {
    "v4": ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4")),
    "v5e": ((4, "2x2"), (8, "2x4"), (16, "4x4")),
    "v5p": ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4")),
    "v6e": ((4, "2x2"), (8, "2x4"), (16, "4x4")),
    "tpu7x": ((8, "2x2x1"), (16, "2x2x2")),
}
"""Slices of TPUs by generation, with the number of JAX's devices: chips, but the halves of chips of tpu7x."""
register_exclusion(str(PROJECT))
# Kernels carry the place of every operation in the first file that is not excluded: none of this repository's lines.
type Facts = dict[str, Any]
type Read = Callable[[jax.stages.Compiled, Path], Facts]
"""What is read of an executable, ready for JSON, with the folder of what XLA has dumped."""


class Target(NamedTuple):
    """Devices that are not there.

    Attributes:
        text: all that their compiler's work depends on.
        mesh: of them, in a line.
        options: of XLA, which an engine has on them.
    """

    text: str
    mesh: Mesh
    options: Mapping[str, Any]


def gpus(gpu: str, generation: str, num_devices: int = 1) -> Target:
    """GPUs of one machine.

    Args:
        gpu: the name of a description in `targets`.
        generation: of the plugin, `cuda13` or `cuda12`.
    """
    target = (TARGETS / f"{gpu}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{num_devices}")
    return Target(f"{generation} {target}", topologies.make_mesh(topology, (num_devices,), (AXIS,)), COMPILER_OPTIONS)


def tpus(tpu: str, num_devices: int = 1) -> Target:
    """The first chips of a slice of TPUs.

    Args:
        tpu: a generation of `TPU_SLICES`.
    """
    name = next(name for size, name in TPU_SLICES[tpu] if size >= num_devices)
    options = {"chip_config_name": "megacore"} if tpu == "v4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{tpu}:{name}", **options).devices
    text = f"{tpu} {name} libtpu {version('libtpu')}"
    return Target(text, Mesh(np.array(devices[:num_devices]), (AXIS,)), {})


class Compiler:
    """Compiles for one target what is added; the interface of `Executables`.

    Args:
        read: reads an executable.
        source: the text of the programs that read: other programs read anew.
        dumped: options with which XLA dumps what `read` needs.
    """

    def __init__(self, target: Target, read: Read, source: str, dumped: Mapping[str, Any] | None = None) -> None:
        self.mesh, self._options = target.mesh, target.options
        self._target, self._read, self._source, self._dumped = target.text, read, source, dumped or {}
        self._kept = Path(os.environ["AOT_RESULTS"])
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._pending: dict[str, Future[Facts]] = {}

    def shape(self, dims: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> jax.ShapeDtypeStruct:
        """The shape of an array on these devices, and how they cut it."""
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(self.mesh, spec))

    def add(
        self,
        key: Any,
        function: Callable[..., Any],
        *arguments: Any,
        donate: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to compile a function.

        Args:
            options: of XLA, beside those of `Executables`.
        """
        name = key if isinstance(key, str) else " ".join(map(str, key))
        options = {**self._options, **(options or {})}

        def compile() -> Facts:
            try:
                with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)
                return self._facts(lowered, options)
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"}

        self._pending[name] = self._pool.submit(compile)

    def finished(self) -> Iterator[tuple[str, Facts]]:
        """Names and facts, as they come."""
        names = {future: name for name, future in self._pending.items()}
        for future in as_completed(names):
            yield names[future], future.result()

    def results(self) -> dict[str, Facts]:
        """The facts by name, in the order of asking."""
        return {name: future.result() for name, future in self._pending.items()}

    def __len__(self) -> int:
        return len(self._pending)

    def _facts(self, lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Facts:
        """What is read of an executable now, or was read of the same program before."""
        program = lowered.as_text()
        if "mosaic_gpu" in program:  # it is asked what its assembler says, which is not kept
            return self._compiled(lowered, options)
        parts = [program, repr(sorted(options.items())), self._target, jax.__version__, self._source]
        parts += filter(None, [os.environ.get("XLA_FLAGS")])  # such as the choices of kernels that a real device made
        path = self._kept / f"{hashlib.sha256('\0'.join(parts).encode()).hexdigest()}.json"
        if not path.exists():
            facts = json.dumps(self._compiled_or_refused(lowered, options))
            self._kept.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._kept, delete=False) as file:
                file.write(facts)
            os.replace(file.name, path)
        return json.loads(path.read_text())

    def _compiled_or_refused(self, lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Facts:
        """What is read of an executable, or why the compiler refuses the program."""
        try:
            return self._compiled(lowered, options)
        except jax.errors.JaxRuntimeError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _compiled(self, lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Facts:
        with tempfile.TemporaryDirectory() as folder:
            dumped = {"xla_dump_to": folder, **self._dumped} if self._dumped else {}
            return self._read(lowered.compile(compiler_options={**options, **dumped}), Path(folder))


class CaseCompiler:
    """Adds those executables of a case of a bill that the case takes to a `Compiler`, named by case and key.

    Args:
        takes: whether executables of a kind, the first word of their keys, are compiled.
        options: of XLA for the case.
    """

    def __init__(
        self, compiler: Compiler, case: Any, takes: Callable[[str], bool], options: Mapping[str, Any] | None = None
    ) -> None:
        self.mesh, self.shape = compiler.mesh, compiler.shape
        self._compiler, self._case, self._takes, self._options = compiler, case, takes, options

    def add(self, key: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> None:
        words = [key] if isinstance(key, str) else list(map(str, key))
        if self._takes(words[0]):
            title = json.dumps([self._case, words])
            self._compiler.add(title, function, *arguments, donate=donate, options=self._options)


def compile_order(begin: Callable[[Mapping[str, Any]], Sequence[Compiler]], *others: Path) -> None:
    """Take an order as JSON from stdin, and write a JSON line to stdout for every executable as it comes.

    A line has `done` and `total` (numbers of executables), `case`, `key`, `num_hosts` of the devices, and `reading`: what was
    read of the executable. With `sources` in the order a last line names the files of the repository that the program has read.

    Args:
        begin: adds what is ordered to the compilers of its devices.
        others: files that `begin` reads beside modules.
    """
    order, lines = json.load(sys.stdin), sys.stdout
    with redirect_stdout(sys.stderr):
        compilers, done = begin(order), 0
        total = sum(map(len, compilers))
        for compiler in compilers:
            num_hosts = len({device.process_index for device in compiler.mesh.devices.flat})
            for title, facts in compiler.finished():
                done += 1
                case, key = json.loads(title)
                line = {
                    "done": done,
                    "total": total,
                    "case": case,
                    "key": key,
                    "num_hosts": num_hosts,
                    "reading": facts,
                }
                print(json.dumps(line), file=lines, flush=True)
        if order.get("sources"):
            print(json.dumps({"sources": loaded_sources(*others)}), file=lines, flush=True)


def loaded_sources(*others: Path) -> list[str]:
    """The files of this repository that the process has read as modules, and others, by their paths in it."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    ours = {file for file in files if file.is_relative_to(PROJECT) and not file.is_relative_to(sys.prefix)}
    return sorted(str(file.relative_to(PROJECT)) for file in {*ours, *others})


class Named:
    """Adds to a compiler under names that begin with another one."""

    def __init__(self, compiler: Any, name: str) -> None:
        self._compiler, self._name = compiler, name

    def add(self, key: Sequence[Any], *arguments: Any, **options: Any) -> None:
        self._compiler.add(" ".join(map(str, (self._name, *key))), *arguments, **options)


def add_runner(
    compiler: Any, config: ModelConfig, shape: RunnerShape, attention: str, assistant: ModelConfig | None = None
) -> tuple[Any, ...]:
    """Add every executable of a runner but the transfers of pages, with abstract weights in bfloat16.

    Args:
        compiler: a `Compiler`, or what adds to one. Its devices cut weights and pages.
        assistant: that drafts, where the shape is for one.

    Returns:
        The pages of the layers that are not in the pool for windows, for transfers.
    """
    model = Model(config, joined=True).on_devices(compiler.mesh.size)
    on_tpus = compiler.mesh.devices.flat[0].platform == "tpu"

    def weights(config: ModelConfig) -> Params:
        params = abstract_params(
            config, jnp.bfloat16, joined=True, num_devices=compiler.mesh.size, experts_apart=on_tpus
        )
        return jax.tree.map(
            lambda spec, weight: jax.tree.map(lambda leaf: compiler.shape(leaf.shape, leaf.dtype, spec), weight),
            partition_specs(params),
            params,
        )

    params, drafting = weights(model.config), None
    if assistant is not None:
        assistant = fitted(assistant, model.config)
        drafting = Assistant(Model(assistant, joined=True), weights(assistant))
    layers, *others = pool_shapes(model, shape, params.embed["embedding"])
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        add_steps(compiler, model, shape, attention, params, drafting)
    if shape.num_states:
        named: Any = Named(compiler, "states")  # adds as `Executables` do
        add_transfers(named, tuple(others[0].values()), (1,), 1, CommonShape(shape.sample_rows[-1], GPU_TRANSFERS[0]))
    return tuple(layers.values())
