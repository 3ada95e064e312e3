"""The bill's rows: for every executable, for every kernel of ours or of the pages, for every product; and their columns at a
terminal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.gpu_bill.assumptions import MIB, Assumptions
from benchmarks.gpu_bill.cases import Case
from benchmarks.gpu_bill.kernel_time import Device
from benchmarks.gpu_bill.program import COLLECTIVES
from benchmarks.gpu_bill.reading import SILENT, Launch, Reading
from jinfercept.models.model import abstract_params

type Row = dict[str, Any]
type Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]


def executable_row(reading: Reading, assumed: Assumptions) -> Row:
    """What one executable launches and moves; counts are of the cheapest path, `all_kernels` of every branch."""
    row: Row = {**_named(reading), "kind": reading.kind, "executable": " ".join(reading.key)}
    if reading.error is not None:
        return row | {"error": reading.error}
    path = reading.path(assumed.loop_turns)
    everything = list(reading.thunks.walk())
    launched = sum(launch.turns for launch in path)
    layers = int(reading.key[2]) if reading.kind == "layers" else None
    read, made, least = _traffic(path)
    return row | {
        "kernels": launched,
        "kernels_per_layer": launched / layers if layers else None,
        "collectives": sum(launch.turns for launch in path if launch.thunk.kind in COLLECTIVES) / (layers or 1),
        "all_kernels": sum(thunk.kind not in SILENT for thunk in everything),
        "command_buffers": sum(thunk.kind == "kCommandBuffer" for thunk in everything),
        "conditionals": sum(thunk.kind == "kConditional" for thunk in everything),
        "loops": sum(thunk.kind == "kWhile" for thunk in everything),
        "host_waits": reading.waits(assumed.loop_turns),
        "read_bytes": read,
        "made_bytes": made,
        "least_bytes": least,
        "times_least": (read + made) / least if least else None,
        "temp_bytes": reading.temp_bytes,
        "copies": sum(_is_copy(reading, launch) for launch in path),
        "products_without_tensor_cores": _plain_products(reading, path),
        "spill_bytes": sum(kernel.spill_bytes for kernel in reading.kernels.values()),
        "compare_and_swaps": _sass(reading, "compare_and_swaps"),
        "atomics": _sass(reading, "atomics"),
        "two_byte_accesses": _sass(reading, "two_byte_accesses"),
    }


def kernel_rows(reading: Reading, device: Device) -> list[Row]:
    """The kernels of an executable that are ours or touch pages, each once."""
    rows = dict[str, Row]()
    for launch in reading.path(device.assumed.loop_turns):
        name, kernel = launch.thunk.kernel, reading.kernels.get(launch.thunk.kernel)
        if kernel is None or kernel.sass is None or name in rows:
            continue
        rows[name] = {
            **_named(reading),
            "executable": " ".join(reading.key),
            "kernel": name,
            "blocks": launch.thunk.blocks,
            "threads": launch.thunk.threads,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": launch.thunk.shared_bytes + kernel.shared_bytes,
            "blocks_at_once": device.blocks(launch, kernel),
            **kernel.sass,
        }
    return list(rows.values())


def product_rows(reading: Reading, device: Device) -> list[Row]:
    """The products of an executable, each once: names of weights of that size, the rate that is assumed, and the time."""
    rows = dict[str, Row]()
    if reading.error is not None:
        return []
    names, count = _weight_names(reading.case), reading.num_rows
    for launch in reading.path(device.assumed.loop_turns):
        weight, kernel = launch.traffic.weight, reading.kernels.get(launch.thunk.kernel)
        name = names.get(weight, "")
        if not weight or f"{name} {weight}" in rows:
            continue
        rows[f"{name} {weight}"] = {
            **_named(reading),
            "executable": " ".join(reading.key),
            "product": name,
            "rows": count,
            "weight_bytes": weight,
            "kernel": launch.thunk.kernel or launch.thunk.kind,
            "blocks": launch.thunk.blocks or None,
            "reach": device.reach(launch, count),
            "seconds": device.seconds(launch, kernel, count),
        }
    return list(rows.values())


@cache
def _weight_names(case: Case) -> Mapping[int, str]:
    """The names of a GPU's weights by their bytes; of several that are alike, all."""
    shapes = abstract_params(case.config, jnp.bfloat16, joined=True, num_devices=case.num_devices)
    names: dict[int, dict[str, None]] = {}
    for path, leaf in jax.tree.flatten_with_path((shapes.layers, shapes.head))[0]:
        size, name = 2 * leaf.size // case.num_devices, jax.tree_util.keystr(path[-1:], simple=True)
        names.setdefault(size, {})[name] = None
    return {size: ", ".join(alike) for size, alike in names.items()}


def _named(reading: Reading) -> Row:
    case = reading.case
    return {
        "gpu": case.gpu,
        "num_devices": case.num_devices,
        "model": case.model,
        "bucket": case.bucket,
        "library": case.library,
        "max_model_len": case.max_model_len,
    }


def _traffic(path: Sequence[Launch]) -> tuple[float, float, float]:
    """Bytes read and made, and the least of them: every argument once, and every result."""
    read = sum(launch.turns * launch.traffic.read for launch in path)
    made = sum(launch.turns * launch.traffic.made for launch in path)
    arguments: dict[str, int] = {}
    for launch in path:
        for name, size in launch.traffic.arguments:
            arguments[name] = max(arguments.get(name, 0), size)
    results = sum(launch.traffic.made for launch in path if launch.traffic.is_result)
    return read, made, sum(arguments.values()) + results


def _is_copy(reading: Reading, launch: Launch) -> bool:
    """Whether a launch copies weights or pages; the partial sums of a product can be as large."""
    kernel = reading.kernels.get(launch.thunk.kernel)
    return launch.traffic.copied > 0 and not (kernel is not None and kernel.has_products)


def _plain_products(reading: Reading, path: Iterable[Launch]) -> int:
    """Kernels that read weights and multiply without tensor cores."""
    kernels = (reading.kernels.get(launch.thunk.kernel) for launch in path if launch.traffic.weight)
    return sum(kernel is not None and not kernel.has_products for kernel in kernels)


def _sass(reading: Reading, count_name: str) -> int:
    """Instructions in kernels of pages and in ours."""
    return sum(kernel.sass[count_name] for kernel in reading.kernels.values() if kernel.sass)


def plain(name: str) -> Callable[[Mapping[str, Any]], str]:
    """A cell of a number or a text; empty without one."""
    return lambda row: (
        "" if row.get(name) is None else f"{row[name]:g}" if isinstance(row[name], float) else str(row[name])
    )


def _mib(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / MIB:.4g}"


def _ms(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{1e3 * row[name]:.2f}"


def _us(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{1e6 * row[name]:.1f}"


def _kernels(row: Mapping[str, Any]) -> str:
    if row.get("error"):
        return str(row["error"])[:60]
    return f"{row['kernels']:g}" + ("" if row["all_kernels"] == row["kernels"] else f" of {row['all_kernels']}")


def _gpus(row: Mapping[str, Any]) -> str:
    return row["gpu"] if row["num_devices"] == 1 else f"{row['num_devices']} × {row['gpu']}"


CASE: Columns = {"GPU": _gpus, "model": plain("model"), "products": plain("library")}
EXECUTABLES: Columns = {
    **CASE,
    "executable": plain("executable"),
    "kernels": _kernels,
    "a layer": plain("kernels_per_layer"),
    "collectives (a layer)": plain("collectives"),
    "command buffers": plain("command_buffers"),
    "conditionals": plain("conditionals"),
    "loops": plain("loops"),
    "host waits": plain("host_waits"),
    "read, MiB": _mib("read_bytes"),
    "made, MiB": _mib("made_bytes"),
    "× least": lambda row: f"{row['times_least']:.3g}" if row.get("times_least") else "",
    "temporary, MiB": _mib("temp_bytes"),
    "large copies": plain("copies"),
    "plain products": plain("products_without_tensor_cores"),
    "spilled bytes": plain("spill_bytes"),
    "CAS": plain("compare_and_swaps"),
    "2-byte": plain("two_byte_accesses"),
}
KERNELS: Columns = {
    **CASE,
    "executable": plain("executable"),
    "kernel": plain("kernel"),
    "blocks": plain("blocks"),
    "threads": plain("threads"),
    "registers": plain("registers"),
    "spilled bytes": plain("spill_bytes"),
    "shared bytes": plain("shared_bytes"),
    "blocks at once": plain("blocks_at_once"),
    "tensor": plain("tensor_instructions"),
    "16-byte loads": plain("wide_loads"),
    "atomics": plain("atomics"),
    "CAS": plain("compare_and_swaps"),
    "2-byte": plain("two_byte_accesses"),
}
PRODUCTS: Columns = {
    **CASE,
    "executable": plain("executable"),
    "product": plain("product"),
    "rows": plain("rows"),
    "weight, MiB": _mib("weight_bytes"),
    "kernel": plain("kernel"),
    "blocks": plain("blocks"),
    "rate": plain("reach"),
    "µs": _us("seconds"),
}
STEPS: Columns = {
    **CASE,
    "rows × context": lambda row: f"{row['rows']} × {row['context']}{f' + {row["chunk"]}' if row['chunk'] else ''}",
    "bucket": lambda row: f"{row['bucket']}{' (default)' if row['default_buckets'] else ''}",
    "roofline, ms": _ms("roofline"),
    "predicted, ms": _ms("seconds"),
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "weights": _ms("weights"),
    "KV": _ms("kv"),
    "compute": _ms("compute"),
    "+ products": _ms("products"),
    "+ attention": _ms("attention"),
    "+ empty blocks": _ms("empty_blocks"),
    "+ collectives": _ms("collectives"),
    "+ others": _ms("others"),
    "+ upload": _ms("uploads"),
    "+ graph updates": _ms("updates"),
    "+ host": _ms("host"),
    "graph updates of the host": _ms("update_work"),  # hidden but for `+ graph updates`
    "kernels": lambda row: f"{row['kernels']:.0f}",
    "host waits": plain("waits"),
}


def terminal(title: str, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table for a terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
