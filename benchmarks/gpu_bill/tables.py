"""The columns of the bill at a terminal: executables, kernels, products, predicted steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu_bill.assumptions import MIB

type Row = Mapping[str, Any]
type Columns = Mapping[str, Callable[[Row], str]]


def plain(name: str) -> Callable[[Row], str]:
    """A cell of a number or a text; empty without one."""
    return lambda row: (
        "" if row.get(name) is None else f"{row[name]:g}" if isinstance(row[name], float) else str(row[name])
    )


def _mib(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / MIB:.4g}"


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row[name]:.2f}"


def _us(name: str) -> Callable[[Row], str]:
    return lambda row: f"{1e6 * row[name]:.1f}"


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}"


def _kernels(row: Row) -> str:
    if row.get("error"):
        return str(row["error"])[:60]
    return f"{row['kernels']:g}" + ("" if row["all_kernels"] == row["kernels"] else f" of {row['all_kernels']}")


def _gpus(row: Row) -> str:
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
STEP: Columns = {
    **CASE,
    "rows × context": lambda row: f"{row['rows']} × {row['context']}",
    "bucket": lambda row: f"{row['bucket']}{' (default)' if row['default_buckets'] else ''}",
    "roofline, ms": _ms("roofline"),
}
TERMS: Columns = {
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
    "graph updates of the host": _ms("update_work"),
}
"""What a step's time consists of; the last is hidden but for `+ graph updates`."""
STEPS: Columns = {
    **STEP,
    "predicted, ms": _ms("seconds"),
    "ratio": _ratio,
    **TERMS,
    "all options": _ms("all_options"),
    "kernels": lambda row: f"{row['kernels']:.0f}",
    "host waits": plain("waits"),
}


def terminal(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    """A table for a terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
