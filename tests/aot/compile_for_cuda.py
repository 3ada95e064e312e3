"""Run as a program where the CUDA plugin is on the path: compiles for a GPU that is not there, and says what came out.

Reads one JSON object from stdin, `{"gpu": "h100", "num_devices": 1, "generation": "cuda13", "kernels": {name: sizes}, "pages":
{name: sizes}, "quantized": {name: sizes}, "fragments": {name: sizes}, "experts": {name: sizes}, "steps": {"model": …, "shape":
…}, "read_ptx": false}`, and writes `{"results": …, "sources": …}` to stdout. The results are by name the error of a
compilation, or what `memory_analysis`, the optimised HLO and the PTX say of it; the sources are the files of the repository
that were read. The folder `$AOT_RESULTS` holds the results of earlier runs by a hash of all that a compilation depends on.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ahead_of_time.compiler import TARGETS, Compiler, Facts, Named, add_runner, gpus, loaded_sources
from benchmarks.ahead_of_time.plugin import tool
from benchmarks.gpu_bill.machine_code import is_product, products_loop, read_kernels
from benchmarks.gpu_suite.fragment_product import DEPTH, arrange
from benchmarks.gpu_suite.fragment_product import product as fragment_product
from jinfercept.models.attention import CUTS, paged_attention
from jinfercept.models.checkpoint import Packing
from jinfercept.models.config import ExpertsConfig
from jinfercept.models.experts import ExpertWeights, choose, combined
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.quantized import QuantizedTensor, product
from jinfercept.pallas.layouts.kv_rows import stored_dtype
from jinfercept.pallas.layouts.packed_weights import WIDTH, Packed
from jinfercept.pallas.layouts.pages import Batch, kv_shape, write_kv
from jinfercept.pallas.layouts.scoring import Rotation, Scoring
from jinfercept.pallas.tiles import Heads, Tile, Tiles, work_cut
from jinfercept.pallas.triton_attention import paged_attention_triton
from jinfercept.pallas.triton_decode import joined_attention_triton
from jinfercept.pallas.work_schedule import Work, WorkSchedule
from jinfercept.runner.packing import CommonShape
from jinfercept.runner.page_transfers import add_transfers, transfer_sizes
from jinfercept.runner.shape import RunnerShape
from tests.support.attention_steps import batch_shapes

HLO_RESULT = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", re.MULTILINE)


PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)")


PTX_ACCESS = re.compile(r"\b(?:(?:ld|st|red)\.global|atom)[\w.]*")


HLO_SORT = re.compile(r" = \(?\w+\[(?:\d+,)*(\d+)\].* sort\(")


HLO_CONTROL = re.compile(r" (conditional|while)\(")


HLO_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


PTX_SCHEDULE = re.compile(r"wgmma\.(mma)_async|wgmma\.wait_group\S* (\d)|(ex2)\.|mbarrier\.(try_wait)")


SOURCE = Path(__file__).read_text()


NO_MEMORY = {"parameter", "get-tuple-element", "bitcast", "custom-call"}  # views, and kernels that write in place


class KernelCompiler(Compiler):
    """Refuses kernels of attention that spill registers, and leaves products to cuBLAS, which can fuse nothing: copies show."""

    def add(
        self,
        key: Any,
        function: Callable[..., Any],
        *arguments: Any,
        donate: tuple[int, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        name = key if isinstance(key, str) else " ".join(map(str, key))
        strict = {
            "xla_gpu_fail_ptx_compilation_on_register_spilling": "paged" in name or " bits, " in name,
            "xla_gpu_enable_triton_gemm": False,
        }
        super().add(name, function, *arguments, donate=donate, options=strict | dict(options or {}))


def _facts(compiled: jax.stages.Compiled, folder: Path) -> Facts:
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
        "mosaic_kernels": hlo.count('custom_call_target="mosaic_gpu_v2"'),
        "collectives": HLO_COLLECTIVE.findall(entry),
        "control_flow": HLO_CONTROL.findall(hlo),
        "sorted": [int(columns) for columns in HLO_SORT.findall(hlo)],
        "accesses": _accesses(folder),
        "code": _code(folder),
    }


def _code(folder: Path) -> dict[str, dict[str, Any]]:
    """What PTX and its assembler say of the kernels for pages and for experts: their file has no other."""
    kernels = read_kernels(folder, str(tool("ptxas")), "", ())
    for ptx in (path.read_text() for path in folder.glob("*.ptx")):
        copied = Counter(str(int(size, 0)) for size in PTX_COPY.findall(ptx))
        for name, scale in address_scales(ptx).items():
            kernels[name] |= {"address_scale": scale, "copied": copied}
    return {name: kernel for name, kernel in kernels.items() if name.startswith(("paged_", "grouped_"))}


def _accesses(folder: Path) -> dict[str, list[str]]:
    """The instructions that access global memory, of every kernel that XLA emitted."""
    kernels = [kernel for path in folder.glob("*.ptx") for kernel in path.read_text().split(".visible .entry ")[1:]]
    return {kernel.split("(")[0]: sorted(set(PTX_ACCESS.findall(kernel))) for kernel in kernels}


def _schedule(ptx: str) -> str:
    """What a Mosaic kernel issues and waits for, a letter each: m(ultiplies), e(xponentiates), t(ries a barrier), and the
    number of products that may be under way after a wait for products."""
    return "".join("".join(words)[0] for words in PTX_SCHEDULE.findall(ptx))


def _loop(ptx: Path) -> tuple[int, int]:
    """Instructions of a kernel's main loop, and the products of tensor cores among them."""
    loop = products_loop(ptx, str(tool("ptxas")), str(tool("nvdisasm")))
    return len(loop), sum(map(is_product, loop))


def _bytes(dtype: str, dims: str) -> int:
    width = int(re.sub(r"\D", "", dtype) or 8)
    return prod(int(size) for size in dims.split(",") if size) * width // 8


def tiles_of(case: dict[str, Any]) -> Tiles | None:
    """The tiles that a case names."""
    tiles = case.get("tiles")
    return None if tiles is None else Tiles(Tile(*tiles[0]), Tile(*tiles[1]), *tiles[2:])


def abstract_work(compiler: KernelCompiler, case: dict[str, Any], fields: Mapping[str, Any]) -> Work:
    """What the kernels of a case read of a batch, by shape."""
    quantised, itemsize = case.get("kv_cache_dtype", "auto") != "auto", jnp.dtype(case["dtype"]).itemsize
    heads = Heads(case["num_heads"], case["num_kv_heads"], case["head_dim"], itemsize, quantised)
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        cut = CUTS[case.get("attention", "triton")](heads) if "tiles" not in case else work_cut(heads, tiles_of(case))
    shapes = cut.shapes(case["num_tokens"], case["num_rows"], decode_only=case.get("decode_only", False))
    schedules = [WorkSchedule(*(compiler.shape(dims, jnp.int32) for dims in each)) for each in shapes]
    read = (fields[name] for name in ("query_starts", "context_lens", "page_tables", "num_decode"))
    return Work(*read, *(*schedules, None)[:2])  # pyright: ignore[reportArgumentType]


def kernel(compiler: KernelCompiler, name: str, case: dict[str, Any]) -> None:
    """Attention alone, over a pool of 20,000 pages, or of as many as the case names."""
    dtype = case["dtype"]
    sizes = case["num_tokens"], case["num_rows"], case["pages_per_row"]
    fields = {field: compiler.shape(dims, jnp.int32) for field, dims in batch_shapes(*sizes).items()}
    batch = Batch(**fields, work=abstract_work(compiler, case, fields))  # pyright: ignore[reportArgumentType]
    q = compiler.shape((case["num_tokens"], case["num_heads"], case["head_dim"]), dtype)
    stored = stored_dtype(case.get("kv_cache_dtype", "auto"), dtype)
    pool = kv_shape(case.get("num_pages", 20_000), case["page_size"], case["num_kv_heads"], case["head_dim"], stored)
    pages = compiler.shape(pool, stored)
    if case.get("joined"):
        joined_kernel(compiler, name, case, pages, batch)
        return
    tiles, sinks = tiles_of(case), compiler.shape((case["num_heads"],), dtype)

    def attend(q, pages, batch, sinks):
        if tiles is None:
            options = {"implementation": case.get("attention", "triton"), "decode_only": case.get("decode_only", False)}
            scoring = Scoring(case.get("window"), case.get("soft_cap"), sinks if case.get("sinks") else None)
            return paged_attention(q, pages, batch, scoring=scoring, **options)
        return paged_attention_triton(q, pages, batch, tiles=tiles)

    compiler.add(name, attend, q, pages, batch, sinks)


def joined_kernel(compiler: KernelCompiler, name: str, case: dict[str, Any], pages: Any, batch: Batch) -> None:
    """Attention of decode rows that also norms and rotates queries and keys and writes keys and values."""
    rows, num_kv_heads, head_dim = case["num_tokens"], case["num_kv_heads"], case["head_dim"]
    width = case["num_heads"] // num_kv_heads + 2
    qkv = compiler.shape((rows, num_kv_heads, width, head_dim), case["dtype"])
    wave, scale = compiler.shape((rows, head_dim // 2), jnp.float32), compiler.shape((head_dim,), case["dtype"])

    def attend(qkv, pages, batch, cos, sin, q_norm, k_norm):
        rotation = Rotation(cos, sin, case["interleaved"], q_norm, k_norm, 1e-6)
        return joined_attention_triton(qkv, rotation, pages, batch)

    compiler.add(name, attend, qkv, pages, batch, wave, wave, scale, scale, donate=(1,))


def steps(compiler: KernelCompiler, case: dict[str, Any]) -> None:
    """Every executable of a runner, with abstract weights in bfloat16."""
    config, assistant = config_from_hf(case["model"]), case.get("assistant")
    config = config.with_draft_layer() if case.get("draft_layer") else config
    shape = RunnerShape(**case["shape"] | {"buckets": tuple(case["shape"]["buckets"])})
    drafting = None if assistant is None else config_from_hf(assistant)
    layers = add_runner(compiler, config, shape, case.get("attention", "triton"), drafting)
    common = CommonShape(shape.sample_rows[-1], transfer_sizes("gpu")[0])
    add_transfers(compiler, layers, transfer_sizes("gpu"), 1, common)  # pyright: ignore[reportArgumentType]


def pages(compiler: KernelCompiler, name: str, case: dict[str, Any]) -> None:
    """What writes the KV of a step into the pages and moves pages, for two layers of 8 heads of 128."""
    pool = compiler.shape(kv_shape(6_000, case["page_size"], 8, 128), case["dtype"])
    for num_tokens in (2, 64, 512):
        rows, index = compiler.shape((num_tokens, 8, 128), case["dtype"]), compiler.shape((num_tokens,), jnp.int32)
        compiler.add(f"{name} write {num_tokens}", write_kv, pool, rows, rows, index, donate=(0,))

    staging = case["staging_pages"]
    sizes = transfer_sizes("gpu", staging)
    add_transfers(Named(compiler, name), (pool, pool), sizes, staging, CommonShape(64, sizes[0]))  # pyright: ignore[reportArgumentType]


def quantized(compiler: KernelCompiler, name: str, case: dict[str, Any]) -> None:
    """A product with a quantised weight, groups of 32."""
    num_rows, depth, num_columns = case["rows"], case["inputs"], case["outputs"]
    stored, kind = (depth // 8, jnp.uint32) if case["bits"] == 4 else (depth, jnp.dtype(case.get("values", "int8")))
    values = compiler.shape((num_columns // WIDTH, stored, WIDTH), kind)
    scales = compiler.shape((num_columns // WIDTH, depth // 32, WIDTH), jnp.float16)

    def multiply(x, values, scales, offsets):
        return product(x, Packed(values, scales, offsets), jnp.bfloat16)

    compiler.add(name, multiply, compiler.shape((num_rows, depth), jnp.bfloat16), values, scales, scales)


def fragments(compiler: KernelCompiler, name: str, case: dict[str, Any]) -> None:
    """A product of the GPU suite with a weight in wgmma's order, groups of 128 or whole columns."""
    kind, depth, num_columns = case["kind"], case["inputs"], case["outputs"]
    num_groups = depth // DEPTH if case["grouped"] else 1
    numbers, scales = compiler.shape((depth, num_columns), kind), compiler.shape((num_groups, num_columns), jnp.float32)
    weight = jax.tree.map(lambda leaf: compiler.shape(leaf.shape, leaf.dtype), jax.eval_shape(arrange, numbers, scales))
    x = compiler.shape((case["rows"], depth), jnp.bfloat16)
    compiler.add(name, partial(fragment_product, kind=kind), x, weight)


def experts(compiler: KernelCompiler, name: str, case: dict[str, Any]) -> None:
    """A layer's experts with biases, in bfloat16, in MXFP4 or in groups of 32 with offsets."""
    num_experts, size, columns, rows = (case[key] for key in ("num_experts", "hidden_size", "ffn_size", "rows"))
    config = ExpertsConfig(num_experts, case["per_token"], columns, normalised=True, swiglu=(7.0, 1.702), biased=True)
    packing = {None: None, "mxfp4": Packing("uint32", 32, "uint8"), "int4": Packing("uint32", 32, offset=True)}
    packing |= {"int8": Packing("int8", 32), "e4m3": Packing("float8_e4m3fn", 128, "float32")}

    def stack(*dims: int) -> Any:
        if (how := packing[case.get("values")]) is None:
            return compiler.shape((num_experts, *dims), jnp.bfloat16)
        stored = QuantizedTensor.of_shape(dims, 1, how, jnp.bfloat16, (num_experts,))
        return jax.tree.map(lambda struct: compiler.shape(struct.shape, struct.dtype), stored)

    biases = (compiler.shape((num_experts, *dims), jnp.bfloat16) for dims in ((2, columns), (size,)))
    weights = ExpertWeights(stack(size, 2, columns), stack(columns, size), *biases)

    def feed(x, router, weights):
        logits = jnp.dot(x, router, preferred_element_type=jnp.float32)
        return combined(x, choose(logits, config), weights, config)

    x, router = compiler.shape((rows, size), jnp.bfloat16), compiler.shape((size, num_experts), jnp.bfloat16)
    compiler.add(f"{name}, experts", feed, x, router, weights)


def main() -> None:
    order = json.load(sys.stdin)
    dumped = {"xla_dump_emitter_re": "ptx"} if "pages" in order or "experts" in order or order.get("read_ptx") else {}
    num_devices = order.get("num_devices", 1)
    compiler = KernelCompiler(gpus(order["gpu"], order["generation"], num_devices), _facts, SOURCE, dumped)
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        if "fragments" in order or "mosaic" in (case.get("attention") for case in order.get("kernels", {}).values()):
            os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        for name, case in order.get("kernels", {}).items():
            kernel(compiler, name, case)
        if "steps" in order:
            steps(compiler, order["steps"])
        for name, case in order.get("pages", {}).items():
            pages(compiler, name, case)
        for name, case in order.get("quantized", {}).items():
            quantized(compiler, name, case)
        for name, case in order.get("fragments", {}).items():
            fragments(compiler, name, case)
        for name, case in order.get("experts", {}).items():
            experts(compiler, name, case)
        results = compiler.results()
        for facts in results.values():
            facts["assembled"] = [path.read_text() for path in Path(folder).glob("*.ptxas")]
            if "fragments" in order:
                facts["loops"] = [_loop(path) for path in Path(folder).glob("*.ptx")]
            facts["scheduled"] = [_schedule(path.read_text()) for path in Path(folder).glob("*.ptx")]
    json.dump({"results": results, "sources": loaded_sources(TARGETS / f"{order['gpu']}.txtpb")}, sys.stdout)


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


if __name__ == "__main__":
    main()
