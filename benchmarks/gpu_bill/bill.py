"""Makes the bill: compiles in child processes, reads, predicts, shows, checks. Runs no JAX computation itself."""

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ahead_of_time.plugin import PROJECT, child_lines, environment, tool
from benchmarks.gpu_bill.assumptions import assumed, listed
from benchmarks.gpu_bill.budgets import PATH as BUDGETS
from benchmarks.gpu_bill.budgets import finish
from benchmarks.gpu_bill.cases import (
    NUM_LAYERS,
    STEPS,
    Case,
    StepSize,
    default_cases,
    full_cases,
    kind_cases,
    sample_case,
)
from benchmarks.gpu_bill.cases import with_default_buckets as with_default
from benchmarks.gpu_bill.kernel_time import Device, multiprocessor
from benchmarks.gpu_bill.prediction import AttentionSizes, ModelBytes, predict
from benchmarks.gpu_bill.reading import Reading, reading
from benchmarks.gpu_bill.rows import EXECUTABLES, KERNELS, PRODUCTS, executable_row, kernel_rows, product_rows, terminal
from benchmarks.gpu_bill.rows import STEPS as STEP_COLUMNS
from jinfercept.config import EngineConfig
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import abstract_params, kv_bytes_per_token
from jinfercept.models.sharding import serving_config
from jinfercept.pallas.tiles import HOPPER, choose_tiles
from jinfercept.sim.reports import check_writable, show
from jinfercept.start.progress import StartDisplay
from jinfercept.start.sizing import buckets

GENERATION = "cuda13"


SAME_CODE = {"h100": ("h100", "h200"), "a100": ("a100",)}
"""The GPUs that run what is compiled for one."""


def gpu_bill(
    *, full: bool, sample: bool, models: Sequence[str], check: bool, set_budgets: bool, out: str | None
) -> int:
    """Run the command; returns the exit status: 1 if a budget is broken that was to be checked.

    Args:
        full: everything; else the default set, or only the `sample`.
        models: of `KIND_MODELS`, in place of all that.
        check: compare with the budgets.
        set_budgets: write the numbers of what was compiled into the budgets first.
        out: path of a JSON file to write.

    Raises:
        ConfigError: `out` cannot be written.
        PluginMissingError: the CUDA plugin cannot be had.
    """
    if out is not None:
        check_writable(Path(out), "--out")
    if models:
        cases = with_default([case for model in models for case in kind_cases(model)], default_buckets(512))
    elif sample:
        cases = [sample_case()]
    else:
        cases = with_default(full_cases() if full else default_cases(), default_buckets(512))
    bill = make_bill(cases)
    show(terminal("executables", EXECUTABLES, bill["executables"]))
    show(terminal("kernels", KERNELS, bill["kernels"]))
    show(terminal("products", PRODUCTS, bill["products"]))
    show(terminal("predicted steps of greedy rows, ms", STEP_COLUMNS, bill["steps"]))
    return finish(bill, BUDGETS, out=out, set_budgets=set_budgets, check=check)


def make_bill(cases: Sequence[Case]) -> dict[str, Any]:
    """The bill of these cases, ready for JSON."""
    readings = sorted(
        _readings(cases), key=lambda entry: (cases.index(entry.case), entry.key[0] != "layers", entry.key)
    )
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "num_layers": NUM_LAYERS,
        "executables": [executable_row(entry, _device(entry.case).assumed) for entry in readings],
        "kernels": [row for entry in readings for row in kernel_rows(entry, _device(entry.case))],
        "products": [row for entry in readings for row in product_rows(entry, _device(entry.case))],
        "steps": list(_steps(readings)),
        "assumptions": [assumption._asdict() for assumption in listed()],
    }


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """The buckets of an engine on a GPU with its defaults but for the rows that run at once."""
    scheduling = EngineConfig.from_options({"max_num_seqs": max_num_seqs}).scheduling
    return buckets(scheduling.max_num_seqs, scheduling.max_num_batched_tokens, "gpu")


def model_bytes(case: Case, tokens: int) -> ModelBytes:
    """The sizes of a case's model, or of a GPU's part of it, for a step of so many query tokens."""
    config = serving_config(case.config, case.num_devices)
    shapes = abstract_params(config, jnp.bfloat16)
    weights = sum(2 * leaf.size for leaf in jax.tree.leaves((shapes.layers, shapes.head))) // case.num_devices
    experts = sum(case.expert_bytes) * config.num_layers // case.num_devices
    return ModelBytes(
        weights=weights - int(experts * case.idle_share(tokens)),
        active=weights - int(experts * case.idle_share(1)),
        head=2 * shapes.head["unembed"].size // case.num_devices,
        num_layers=config.num_layers,
        layers_per_call=config.num_layers,
        attention=tuple(_attention_sizes(config, layer, case.num_devices) for layer in range(case.num_layers)),
    )


def _attention_sizes(config: ModelConfig, layer: int, num_devices: int) -> AttentionSizes:
    kind = config.kind(layer)
    sizes = config.of_kind(kind)
    tiles = choose_tiles(sizes.head_dim, sizes.num_heads // sizes.num_kv_heads, 2, HOPPER, 1)  # decode tiles are alike
    return AttentionSizes(
        num_kv_heads=sizes.num_kv_heads // num_devices,
        kv_per_token=kv_bytes_per_token(replace(sizes, num_layers=1, kinds=()), jnp.bfloat16) // num_devices,
        tile_tokens=tiles.decode.tokens,
        pair_flops=4 * sizes.num_heads * sizes.head_dim // num_devices,
        window=kind.window,
    )


def _readings(cases: Sequence[Case]) -> Iterator[Reading]:
    """Compile in a process for each GPU; shows progress."""
    with StartDisplay() as display:
        for gpu in dict.fromkeys(case.gpu for case in cases):
            order = {
                "gpu": gpu,
                "generation": GENERATION,
                "ptxas": str(tool("ptxas", GENERATION)),
                "nvdisasm": str(tool("nvdisasm", GENERATION)),
                "cases": [case for case in cases if case.gpu == gpu],
            }
            for line in _lines(order):
                display(gpu, line["done"], line["total"])
                yield reading(line)


def _lines(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return child_lines("benchmarks.gpu_bill.child", environment(GENERATION), order)


@cache
def _device(case: Case, gpu: str | None = None) -> Device:
    """The GPU of a case, or another that runs the same code."""
    return Device(multiprocessor(case.gpu), assumed(gpu or case.gpu), case.num_devices)


def _steps(readings: Sequence[Reading]) -> Iterator[dict[str, Any]]:
    """Predicted steps, of the buckets that fit the rows best and of those of an engine's defaults."""
    by_case: dict[Case, list[Reading]] = {}
    for entry in readings:
        by_case.setdefault(entry.case._replace(transfers=False), []).append(entry)
    for mine in _families(by_case):
        for size in STEPS:
            for is_default, case in _cases_of([case for case in mine if case.takes(size.context)], size):
                plain = case._replace(triton_products=False)
                of_step = _with_shared(by_case[case], by_case.get(plain, []))
                for gpu in SAME_CODE[case.gpu]:
                    step = predict(of_step, _device(case, gpu), model_bytes(case, size.tokens), size)
                    yield {
                        "gpu": gpu,
                        "num_devices": case.num_devices,
                        "model": case.model,
                        "library": case.library,
                        **size._asdict(),
                        "bucket": case.bucket,
                        "default_buckets": is_default,
                        **step.row(),
                    }


def _families(cases: Iterable[Case]) -> list[list[Case]]:
    """The cases that differ in their buckets alone, together."""
    families: dict[Case, list[Case]] = {}
    for case in cases:
        families.setdefault(case._replace(bucket=0, max_num_seqs=0), []).append(case)
    return list(families.values())


def _with_shared(mine: Sequence[Reading], others: Sequence[Reading]) -> list[Reading]:
    """A case's executables, and those that are compiled once for both ways of multiplying."""
    kinds = {entry.kind for entry in mine}
    return [*mine, *(entry for entry in others if entry.kind not in kinds)]


def _cases_of(cases: Sequence[Case], size: StepSize) -> Iterator[tuple[bool, Case]]:
    """The case of the smallest bucket for a step without a chunk, and the case of the bucket of an engine's defaults."""
    tokens, rows = size.tokens, size.sequences
    tight = [case for case in cases if case.bucket == case.max_num_seqs and rows <= case.bucket < max(8, 2 * rows)]
    own = [] if size.chunk else tight
    default = next((bucket for bucket in default_buckets(rows) if bucket >= tokens), tokens)
    served = [case for case in cases if case.bucket == default and rows <= case.max_num_seqs]
    for is_default, fitting in ((False, own), (True, served)):
        if fitting:
            yield is_default, min(fitting, key=lambda case: (case.bucket, case.max_num_seqs))


def _commit() -> str:
    """The last commit that changed the package, in 8 digits; with a mark if there are changes that are not committed."""
    run = {"cwd": PROJECT, "capture_output": True, "text": True, "check": True}
    log = ["git", "log", "-1", "--abbrev=8", "--format=%h", "--", "jinfercept"]
    head = subprocess.run(log, **run).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "jinfercept"], **run).stdout.strip()
    return f"{head} with changes" if changed else head
