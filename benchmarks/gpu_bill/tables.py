"""The bill in Markdown and at a terminal: executables, kernels, predicted steps, assumptions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.gpu_bill.assumptions import MIB, Assumption

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


def _worse(cell: Callable[[Row], str]) -> Callable[[Row], str]:
    """The same cell of the step with the pessimistic rates."""
    return lambda row: cell(row["pessimistic"])


def _above(row: Row) -> str:
    """The terms above the roofline, the largest first; what is shorter than 0.05 ms is left out."""
    terms = sorted(((row[name], name.replace("_", " ")) for name in ABOVE), reverse=True)
    return ", ".join(f"{name} {1e3 * seconds:.2f}" for seconds, name in terms if seconds >= 0.05e-3)


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
    "pessimistic rate": plain("pessimistic_reach"),
    "pessimistic µs": _us("pessimistic_seconds"),
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
    "+ launches": _ms("launches"),
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
    "guess with the pessimistic rates, ms": _worse(_ms("seconds")),
    "its ratio": _worse(_ratio),
    **TERMS,
    "all options": _ms("all_options"),
    "kernels": lambda row: f"{row['kernels']:.0f}",
    "host waits": plain("waits"),
}
PESSIMISTIC_STEPS: Columns = {
    **STEP,
    "guess with the pessimistic rates, ms": _worse(_ms("seconds")),
    "its ratio": _worse(_ratio),
    **{name: _worse(cell) for name, cell in TERMS.items()},
    "all options": _worse(_ms("all_options")),
}
AIM = 1.2
"""Most of the roofline, of Llama-3-8B's rows with a context of 1,000 on an H100, with the pessimistic rates too."""
AIMED = {"gpu": "h100", "model": "llama-3-8b", "num_devices": 1, "context": 1000, "default_buckets": True}
AIMED_ROWS = (1, 64, 256)
ABOVE = ("products", "attention", "empty_blocks", "others", "launches", "uploads", "updates", "host")
AIMS: Columns = {
    "products": plain("library"),
    "rows × context": lambda row: f"{row['rows']} × {row['context']}",
    f"{AIM} × roofline, ms": lambda row: f"{1e3 * AIM * row['roofline']:.2f}",
    "predicted, ms": _ms("seconds"),
    "ratio": _ratio,
    "guess with the pessimistic rates, ms": _worse(_ms("seconds")),
    "its ratio": _worse(_ratio),
    "misses by, ms": lambda row: f"{1e3 * max(0.0, row['pessimistic']['seconds'] - AIM * row['roofline']):.2f}",
    "above the roofline, ms": _worse(lambda row: _above(row)),
}
LEGEND = """Executables of layers have {num_layers} layers. Counts are of the cheapest branch of every conditional, which is the
branch of greedy rows; "of" gives the kernels of all branches. "× least": bytes read and made over the bytes of every argument
and every result, each once. "Plain products" read weights and multiply without tensor cores. "CAS" and "2-byte" are
instructions in kernels that touch pages. "Blocks at once" is on one multiprocessor. Products are made by cuBLAS alone, or by
Triton kernels where XLA prefers them, untuned: its autotuner needs the device. "(default)" is the bucket of an engine's
defaults; its terms are above the same roofline. "All options" is what sampling takes more, no part of the step, if rows ask for
every option. The guess with the pessimistic rates takes the worse end of every number in doubt at once, see the assumptions.
"Rate" is of a product, as a part of the rate of copies; a product takes longer where its loads in flight or its multiplications
bound it."""


def aimed(steps: Sequence[Row]) -> list[Row]:
    """The steps for which there is an aim."""
    return [step for step in steps if step["rows"] in AIMED_ROWS and all(step[name] == AIMED[name] for name in AIMED)]


def markdown(columns: Columns, rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def terminal(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    """A table for a terminal."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def document(bill: Mapping[str, Any], assumptions: Sequence[Assumption]) -> str:
    """The whole bill in Markdown."""
    assumed = [assumption._asdict() for assumption in assumptions]
    columns: Columns = {name: plain(name) for name in Assumption._fields}
    return "\n".join(
        [
            f"# GPU bill of {bill['commit']}, {bill['date']}",
            f"\nCompiled ahead of time with JAX {bill['jax']}; nothing here was run on a GPU.",
            LEGEND.format(num_layers=bill["num_layers"]),
            f"\n## The aim: {AIM} of the roofline, Llama-3-8B on an H100\n",
            markdown(AIMS, aimed(bill["steps"])),
            "## Predicted steps of greedy rows, ms\n",
            markdown(STEPS, bill["steps"]),
            "## The same steps with the pessimistic rates, ms\n",
            markdown(PESSIMISTIC_STEPS, bill["steps"]),
            "## Products\n",
            markdown(PRODUCTS, bill["products"]),
            "## Executables\n",
            markdown(EXECUTABLES, bill["executables"]),
            "## Kernels of ours, and of pages\n",
            markdown(KERNELS, bill["kernels"]),
            "## Assumptions\n",
            markdown(columns, assumed),
        ]
    )
