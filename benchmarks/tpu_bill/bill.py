"""Makes the bill: compiles in child processes, reads, predicts, shows, checks. Runs no JAX computation itself.

A predicted step is the least that its bytes and operations take by the data sheet (`sched/named_profiles.py`, with the shares
that programs reach): weights as the executables read them, and the keys and values of the contexts in whole blocks of the
kernel. It has no launches, since nothing has timed them on a TPU. It stands beside the step of the roofline that `simulate`
uses, which knows nothing of what was compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.ahead_of_time.plugin import child_lines, tpu_environment
from benchmarks.gpu_bill.budgets import finish
from benchmarks.gpu_bill.rows import Columns, plain, terminal
from benchmarks.tpu_bill.cases import (
    CONTEXT,
    SHARE_OF_CHIP,
    SHEETS,
    Case,
    case_of,
    default_cases,
    sample_cases,
)
from jinfercept.errors import ConfigError
from jinfercept.models.model import abstract_params, param_bytes
from jinfercept.models.sharding import serving_config
from jinfercept.pallas.layouts.interleaved import interleaved_shape
from jinfercept.pallas.tpu_kernels import CONTEXT_TOKENS
from jinfercept.sched.named_profiles import (
    ACCELERATORS,
    REACHED_BANDWIDTH,
    REACHED_FLOPS,
    ProfiledExperts,
    ProfiledModel,
    experts_in_use,
    roofline,
)
from jinfercept.sim.reports import check_writable, show
from jinfercept.start.progress import StartDisplay

BUDGETS = Path(__file__).parent / "budgets.toml"
MIB = 1 << 20
_EXECUTABLES = {
    "tpu": "TPU",
    "num_devices": "devices",
    "num_hosts": "hosts",
    "model": "model",
    "executable": "executable",
    "launches": "launches",
    "kernels": "Pallas",
    "fallbacks": "XLA instead",
    "argument_mib": "arguments, MiB",
    "temp_mib": "temporaries, MiB",
    "made_mib": "made anew, MiB",
    "copies": "copies of 4 MiB and more",
    "prefetched_mib": "fetched ahead, MiB",
    "collectives": "exchanges",
    "host_transfers": "host transfers",
}
_STEPS = {
    "tpu": "TPU",
    "num_devices": "devices",
    "model": "model",
    "rows": "rows",
    "context": "context",
    "weights_mib": "weights read, MiB",
    "kv_mib": "KV read, MiB",
    "least_ms": "least, ms",
    "roofline_ms": "roofline, ms",
}

EXECUTABLES: Columns = {title: plain(name) for name, title in _EXECUTABLES.items()}
STEPS: Columns = {title: plain(name) for name, title in _STEPS.items()}


class Reading(NamedTuple):
    """What was read of an executable."""

    case: Case
    key: tuple[str, ...]
    num_hosts: int
    facts: Mapping[str, Any]


def tpu_bill(*, sample: bool, check: bool, set_budgets: bool, tpus: Sequence[str], out: str | None) -> int:
    """Run the command; returns the exit status: 1 if a budget is broken that was to be checked.

    Args:
        sample: compile a few executables only.
        check: compare with the budgets.
        set_budgets: write the numbers of what was compiled into the budgets first.
        tpus: generations.
        out: path of a JSON file to write.

    Raises:
        ConfigError: `out` cannot be written.
        PluginMissingError: the library of TPUs cannot be had.
    """
    if out is not None:
        check_writable(Path(out), "--out")
    bill = make_bill(sample_cases() if sample else default_cases(tpus))
    show(terminal("executables", EXECUTABLES, bill["executables"]))
    show(terminal("predicted decode steps; no TPU has run one", STEPS, bill["steps"]))
    return finish(bill, BUDGETS, out=out, set_budgets=set_budgets, check=check)


def make_bill(cases: Sequence[Case]) -> dict[str, Any]:
    """The bill of these cases, ready for JSON."""
    readings = sorted(_readings(cases), key=lambda reading: (cases.index(reading.case), reading.key))
    rows = [executable_row(reading) for reading in readings]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "executables": rows,
        "steps": [row for case in cases if (row := step_row(case, readings)) is not None],
    }


def executable_row(reading: Reading) -> dict[str, Any]:
    """A row of the table of executables."""
    case, key, num_hosts, facts = reading
    row = {
        "tpu": case.tpu,
        "gpu": case.tpu,  # the name of this condition in budgets
        "num_devices": case.num_devices,
        "num_hosts": num_hosts,
        "model": case.model if case.kv_cache_dtype == "auto" else f"{case.model}, KV {case.kv_cache_dtype}",
        "bucket": case.bucket,
        "kind": key[0],
        "executable": " ".join(key),
        "library": "XLA",
        "error": facts["error"],
    }
    if facts["error"]:
        return row
    return row | {
        "launches": facts["launches"],
        "kernels": facts["kernels"],
        "fallbacks": max(0, kernels_of_layers(case) - facts["kernels"]) if key[0] == "layers" else 0,
        "argument_mib": round(facts["argument_bytes"] / MIB, 1),
        "temp_mib": round(facts["temp_bytes"] / MIB, 1),
        "made_mib": round(facts["made_bytes"] / MIB, 1),
        "copies": len(facts["copies"]),
        "prefetched_mib": round(facts["prefetched_bytes"] / MIB, 1),
        "collectives": sum(facts["collectives"].values()),
        "loops": facts["loops"],
        "host_transfers": facts["host_transfers"],
    }


def kernels_of_layers(case: Case) -> int:
    """Kernels of an executable of layers that falls back nowhere: attention, and the three products of experts."""
    return case.num_layers * (1 if case.config.experts is None else 4)


def step_row(case: Case, readings: Sequence[Reading]) -> dict[str, Any] | None:
    """The predicted decode step of a case; None if it is not of decode rows, or not all of it was compiled."""
    own = {reading.key[0]: reading.facts for reading in readings if reading.case == case}
    if not {"layers", "head"} <= own.keys() or own["layers"]["error"] or own["head"]["error"] or case.kinds:
        return None
    config, share = serving_config(case.config, case.num_devices), SHARE_OF_CHIP.get(case.tpu, 1.0)
    sheet = ACCELERATORS[SHEETS[case.tpu]]
    weights = read_bytes(case)
    page = interleaved_shape(1, 1, config.num_kv_heads, config.head_dim, jnp.bfloat16, case.num_devices)
    token = 2 * page[2] * page[3] // case.num_devices
    seen = -(-CONTEXT // CONTEXT_TOKENS) * CONTEXT_TOKENS  # windows are read whole
    kv = case.bucket * seen * token * config.num_layers
    flops = own["layers"]["flops"] * config.num_layers / case.num_layers + own["head"]["flops"]
    bytes_s = (weights + kv) / (sheet.memory_bytes_per_s * REACHED_BANDWIDTH * share)
    least_s = max(bytes_s, flops / (sheet.bf16_flops * REACHED_FLOPS * share))
    chips = int(case.num_devices * share)
    roofline_ms = None
    with suppress(ConfigError):  # half a chip, or the weights do not fit so few
        profile = roofline(profiled(case), SHEETS[case.tpu], chips)
        roofline_ms = round(1e3 * profile.step_s(case.bucket, case.bucket * CONTEXT), 2)
    return {
        "tpu": case.tpu,
        "num_devices": case.num_devices,
        "model": case.model,
        "rows": case.bucket,
        "context": CONTEXT,
        "weights_mib": round(weights / MIB),
        "kv_mib": round(kv / MIB),
        "least_ms": round(1e3 * least_s, 2),
        "roofline_ms": roofline_ms,
    }


def read_bytes(case: Case) -> float:
    """Bytes of weights that a device reads in a decode step of a full bucket: of the experts those in use."""
    config = serving_config(case.config, case.num_devices)
    shapes = abstract_params(config, jnp.bfloat16, joined=True, num_devices=case.num_devices)
    leaves = jax.tree.leaves((shapes.layers, shapes.head))
    total = sum(2 * leaf.size for leaf in leaves) / case.num_devices
    if (experts := config.experts) is None:
        return total
    all_experts = 2 * 3 * experts.num_experts * config.hidden_size * experts.ffn_size * config.num_layers
    used = experts_in_use(experts.num_experts, experts.per_token, case.bucket) / experts.num_experts
    return total - all_experts * (1 - used) / case.num_devices


def profiled(case: Case) -> ProfiledModel:
    """The numbers of a case's model that a roofline needs."""
    config, experts = case.config, None
    if config.experts is not None:
        count, per_token = config.experts.num_experts, config.experts.per_token
        params = 3 * count * config.hidden_size * config.experts.ffn_size * config.num_layers
        experts = ProfiledExperts(params, count, per_token)
    params = param_bytes(config, jnp.bfloat16) / 2
    sizes = config.num_layers, config.num_kv_heads, config.head_dim, config.hidden_size
    return ProfiledModel(case.model, params, *sizes, experts=experts)


def _readings(cases: Sequence[Case]) -> Iterator[Reading]:
    """Compile in a process for each generation; shows progress."""
    with StartDisplay() as display:
        for tpu in dict.fromkeys(case.tpu for case in cases):
            for line in _lines({"cases": [case for case in cases if case.tpu == tpu]}):
                display(tpu, line["done"], line["total"])
                yield Reading(case_of(line["case"]), tuple(line["key"]), line["num_hosts"], line["reading"])


def _lines(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return child_lines("benchmarks.tpu_bill.child", tpu_environment(), order)
