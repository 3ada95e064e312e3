"""Run as a program where the CUDA plugin is on the path: compiles for a GPU that is not there, and says what came out.

Reads one JSON object from stdin, `{"gpu": "h100", "kernels": {name: sizes}, "steps": {"model": …, "shape": …}}`, and writes
one to stdout: by name the error of a compilation, or what `memory_analysis` and the optimised HLO say of it.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfercept.executables import COMPILER_OPTIONS
from jinfercept.kv.arrays import add_transfers
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import Model, abstract_params
from jinfercept.pallas.layout import Batch, batch_shapes, kv_shape
from jinfercept.pallas.tiles import Tile, Tiles
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.runner import RunnerShape, add_steps

HLO_RESULT = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", re.MULTILINE)
NO_MEMORY = {"parameter", "get-tuple-element", "bitcast", "custom-call"}  # views, and kernels that write in place


class Compiler:
    """Compiles for one GPU what is added, all at once; the interface of `Executables`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._home = NamedSharding(mesh, PartitionSpec())
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._pending: dict[str, Future[dict[str, Any]]] = {}

    def shape(self, dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self._home)

    def add(self, key: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> None:
        name = key if isinstance(key, str) else " ".join(map(str, key))
        options = COMPILER_OPTIONS | {
            "xla_gpu_fail_ptx_compilation_on_register_spilling": "paged" in name,
            "xla_gpu_enable_triton_gemm": False,  # products by cuBLAS, which can fuse nothing: what is copied shows
        }

        def compile() -> dict[str, Any]:
            try:
                with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                    lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
                return _facts(lowered.compile(compiler_options=options))
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"}

        self._pending[name] = self._pool.submit(compile)

    def results(self) -> dict[str, dict[str, Any]]:
        """What came out, in the order of asking."""
        return {name: future.result() for name, future in self._pending.items()}


def _facts(compiled: jax.stages.Compiled) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    assert memory is not None
    assert hlo is not None
    entry = hlo.split("\nENTRY ")[1]
    made = [
        (_bytes(dtype, dims), f"{opcode} {name}")
        for name, dtype, dims, opcode in HLO_RESULT.findall(entry)
        if opcode not in NO_MEMORY
    ]
    return {
        "error": None,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "made": sorted(made, reverse=True)[:100],
        "kernels": entry.count('custom_call_target="__gpu$xla.gpu.triton"'),
    }


def _bytes(dtype: str, dims: str) -> int:
    width = int(re.sub(r"\D", "", dtype) or 8)
    return prod(int(size) for size in dims.split(",") if size) * width // 8


def kernel(compiler: Compiler, name: str, case: dict[str, Any]) -> None:
    """Attention alone, over a pool of 20,000 pages."""
    dtype = case["dtype"]
    sizes = case["num_tokens"], case["num_rows"], case["pages_per_row"]
    fields = {field: compiler.shape(dims, jnp.int32) for field, dims in batch_shapes(*sizes).items()}
    batch = Batch(**fields)  # pyright: ignore[reportArgumentType]
    q = compiler.shape((case["num_tokens"], case["num_heads"], case["head_dim"]), dtype)
    pages = compiler.shape(kv_shape(20_000, case["page_size"], case["num_kv_heads"], case["head_dim"]), dtype)
    tiles = case.get("tiles")
    if tiles is not None:
        tiles = Tiles(Tile(*tiles[0]), Tile(*tiles[1]), *tiles[2:])

    def attend(q, pages, batch):
        return paged_attention_triton(q, pages, batch, tiles=tiles)

    compiler.add(name, attend, q, pages, batch)


def steps(compiler: Compiler, case: dict[str, Any]) -> None:
    """Every executable of a runner, with abstract weights in bfloat16."""
    config = ModelConfig.from_hf(case["model"])
    shape = RunnerShape(**case["shape"] | {"buckets": tuple(case["shape"]["buckets"])})
    params = jax.tree.map(lambda leaf: compiler.shape(leaf.shape, leaf.dtype), abstract_params(config, jnp.bfloat16))
    pool = kv_shape(shape.num_pages + 1, shape.page_size, config.num_kv_heads, config.head_dim)
    layers = (compiler.shape(pool, jnp.bfloat16),) * config.num_layers
    page = compiler.shape((config.num_layers, *pool[1:]), jnp.bfloat16)
    last_tokens = compiler.shape((shape.max_num_seqs + 1,), jnp.int32)
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        add_steps(compiler, Model(config), shape, "triton", params, layers, last_tokens)  # pyright: ignore[reportArgumentType]
    add_transfers(compiler, layers, page)  # pyright: ignore[reportArgumentType]


def main() -> None:
    asked = json.load(sys.stdin)
    target = (Path(__file__).parent / f"{asked['gpu']}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    compiler = Compiler(topologies.make_mesh(topology, (1,), ("device",)))
    with redirect_stdout(sys.stderr):
        for name, case in asked.get("kernels", {}).items():
            kernel(compiler, name, case)
        if "steps" in asked:
            steps(compiler, asked["steps"])
        results = compiler.results()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
