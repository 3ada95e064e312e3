"""What a step costs the host, part by part, and what dispatching one step ahead hides of it.

A small model with random weights decodes for every batch size, at pipeline depth 0 and 1 in turns. On a CPU the "device"
competes with the host for the same cores, so what depth 1 can hide shows with a second runner too: it computes nothing and
its results are there after the seconds given, as on a device of its own. With `--devices 1 --devices 2`, the CPU is several
devices that share the model too, all of which the host dispatches to.

The model has as many layers and arrays as Llama-3-8B, so that a call costs the host what it costs there; `host` is the
time of the engine's thread, without what the device computes. Several `--layers-per-step` are compared in one run.

    python benchmarks/host_time.py [--batch 1 --batch 64 --batch 256] [--devices 1] [--device-ms 5] [--layers-per-step 32]
"""

import argparse
import gc
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jinfercept.engine.dispatcher import Dispatcher, RealClock
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.model import Model, abstract_params
from jinfercept.request import Request
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import enter, pack
from jinfercept.runner.packing_samples import pack_samples, sampled_rows
from jinfercept.runner.runner import ModelRunner, StepTicket
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.start.start import EngineSetup, set_up

MODEL = config_from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
)
ROUNDS = 3
"""Turns of each depth: what disturbs the machine for a while meets both."""
WARM_STEPS = 8
PARTS = ("total", "wait", "host", "plan", "pack", "submit", "read", "apply")


class Step(NamedTuple):
    """Seconds of one step: `total` and `wait` (for the device) by the clock; of the engine's thread what it spent on planning,
    submitting (packing and dispatching), reading the tokens and applying them."""

    total: float
    wait: float
    plan: float
    submit: float
    read: float
    apply: float


class Device:
    """A runner whose results are there after so many seconds at least, one plan after the other, and no core is busy
    meanwhile."""

    def __init__(self, runner: ModelRunner, seconds: float = 0.0) -> None:
        self.forward, self.collect = runner.forward, runner.collect
        self._runner, self._seconds, self._ready_s = runner, seconds, deque[float]()

    def sample(self, forward: Any, masks: Masks) -> StepTicket:
        ticket = self._runner.sample(forward, masks)
        began_s = max(time.perf_counter(), *self._ready_s, 0.0)
        self._ready_s.append(began_s + self._seconds)
        return ticket

    def wait(self, ticket: StepTicket) -> None:
        if ticket.drawn.tokens is not None:
            ticket.drawn.tokens.block_until_ready()
        time.sleep(max(0.0, self._ready_s.popleft() - time.perf_counter()))

    def reset(self) -> None:
        self._runner.reset()
        self._ready_s.clear()


class Hollow:
    """Executables that have the arguments and results of a runner's, and compute nothing."""

    def __init__(self) -> None:
        self.run = Executables()
        self._add, self.run.add = self.run.add, self.add

    def add(self, key: Hashable, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> None:
        results = jax.eval_shape(function, *arguments)

        def nothing(*arguments: Any) -> Any:
            arguments = jax.lax.optimization_barrier(arguments)  # so that none is left out of the call
            given = [leaf for index in donate for leaf in jax.tree.leaves(arguments[index])]

            def result(like: jax.ShapeDtypeStruct) -> jax.Array:
                same = (
                    place for place, leaf in enumerate(given) if (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
                )
                place = next(same, None)
                return jnp.zeros(like.shape, like.dtype) if place is None else given.pop(place)

            return jax.tree.map(result, results)

        self._add(key, nothing, *arguments, donate=donate)


class Stopwatch:
    """Passes plans on, and notes what the parts of a step took."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.reset = device.reset
        self.plans: list[StepPlan] = []
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._began_s = time.perf_counter()
        self._planning_s = self._submitting_s = self._submitted_s = self._read_s = time.thread_time()
        self._wait_s = self._reading_s = 0.0

    def forward(self, plan: StepPlan) -> Any:
        self._submitting_s = time.thread_time()
        forward = self._device.forward(plan)
        self.plans.append(plan)
        return forward

    def sample(self, forward: Any, masks: Masks) -> Any:
        ticket = self._device.sample(forward, masks)
        self._submitted_s = time.thread_time()
        return ticket

    def collect(self, ticket: Any) -> StepResult:
        waiting_s = time.perf_counter()
        self._device.wait(ticket)
        self._wait_s = time.perf_counter() - waiting_s
        self._reading_s = time.thread_time()
        result = self._device.collect(ticket)
        self._read_s = time.thread_time()
        return result

    def end(self) -> Step:
        """A step has ended; what it took."""
        applied_s = time.thread_time()
        return Step(
            total=time.perf_counter() - self._began_s,
            wait=self._wait_s,
            plan=self._submitting_s - self._planning_s,
            submit=self._submitted_s - self._submitting_s,
            read=self._read_s - self._reading_s,
            apply=applied_s - self._read_s,
        )


def time_packing(plans: list[StepPlan], shape: RunnerShape) -> float:
    """Median seconds to pack such plans."""
    tables = np.zeros((shape.max_num_seqs, shape.bucket(1).pages_per_row), np.int32)
    taken = []
    for plan in plans:
        began_s = time.thread_time()
        pack_plan(plan, tables, shape)
        taken.append(time.thread_time() - began_s)
    return median(taken)


def pack_plan(plan: StepPlan, tables: np.ndarray, shape: RunnerShape) -> None:
    """What a runner packs for a plan."""
    enter(plan.chunks, tables)
    pack(plan.chunks, tables, shape.page_size, shape.bucket(plan.bucket))
    pack_samples(sampled_rows(plan.chunks), shape.max_num_seqs, shape.max_num_seqs)


def decode(setup: EngineSetup, device: Device, batch: int, depth: int, options: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of the parts of a step in which every sequence decodes."""
    serving = setup.changed(pipeline_depth=depth).serve()
    serving.dispatcher.close()
    setup.runner.reset()
    wake = threading.Event()
    dispatcher, watch, vocab_size = Dispatcher(wake.set), Stopwatch(device), setup.model.config.vocab_size
    requests = RequestLifecycle(serving.engine.scheduler, dispatcher, RealClock(), vocab_size=vocab_size)
    engine = Engine(requests, watch, wake, depth=depth)
    for number in range(batch):
        prompt = [(7 * number + index) % vocab_size for index in range(options.context)]
        engine.submit(Request(str(number), tuple(prompt), SamplingParams(max_tokens=1 << 20, ignore_eos=True)))
    while len(engine.scheduler.running) < batch or engine.scheduler.running[-1].generated < WARM_STEPS:
        engine.step()
    gc.collect()
    gc.freeze()
    watch.plans.clear()
    steps = []
    for _ in range(options.steps // ROUNDS):
        watch.begin()
        engine.step()
        steps.append(watch.end())
    gc.unfreeze()
    engine.close()
    dispatcher.close()
    seconds = {part: median(getattr(step, part) for step in steps) for part in Step._fields}
    seconds["host"] = median(step.plan + step.submit + step.read + step.apply for step in steps)
    seconds["pack"] = time_packing(watch.plans, setup.shape)
    return {part: 1e6 * seconds[part] for part in PARTS}


def measure(setup: EngineSetup, device: Device, batch: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Microseconds of the parts by pipeline depth, which take turns: the least of all rounds, since what disturbs only adds."""
    rounds = [{depth: decode(setup, device, batch, depth, options) for depth in (0, 1)} for _ in range(ROUNDS)]
    return {depth: {part: min(once[depth][part] for once in rounds) for part in PARTS} for depth in (0, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", help="may be repeated (default: 1, 64, 256)")
    parser.add_argument("--devices", type=int, action="append", choices=(1, 2), help="may be repeated (default: 1)")
    parser.add_argument("--device-ms", type=float, default=5.0, help="of the second runner's steps (default: 5)")
    parser.add_argument("--context", type=int, default=16, help="tokens of every prompt (default: 16)")
    parser.add_argument("--steps", type=int, default=90, help="steps to time (default: 90)")
    layers_help = "of the model's 32; may be repeated (default: 32)"
    parser.add_argument("--layers-per-step", type=int, action="append", help=layers_help)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False, title="µs per step")
    for name in ("device", "layers", "batch", "depth", *PARTS, "depth 0 : 1"):
        table.add_column(name, justify="left" if name == "device" else "right")
    rows, counts = [], sorted(set(options.devices or [1]))
    jax.config.update("jax_num_cpu_devices", counts[-1])
    for batch, num_devices, layers in product(options.batch or [1, 64, 256], counts, options.layers_per_step or [32]):
        with closing(
            set_up(
                MODEL,
                load_format="dummy",
                dtype="float32",
                profile=PROFILES["paper-gptj-6b-a100"],
                kv_tokens=batch * (options.context + WARM_STEPS + options.steps + 64),
                max_num_seqs=batch,
                max_num_batched_tokens=max(batch, 128),
                layers_per_step=layers,
                swap_space=0,
                tensor_parallel_size=num_devices,
            )
        ) as setup:
            runners = {"this CPU" if num_devices == 1 else f"as {num_devices}": Device(setup.runner)}
            if num_devices == 1:
                weights = abstract_params(MODEL, "float32", joined=True)  # as on a GPU
                zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), weights)
                hollow = ModelRunner(Model(MODEL, joined=True), zeros, setup.shape, executables=Hollow().run)
                hollow.warm_up()
                runners[f"{options.device_ms:g} ms"] = Device(hollow, 1e-3 * options.device_ms)
            for name, device in runners.items():
                parts = measure(setup, device, batch, options)
                gain = parts[0]["total"] / parts[1]["total"]
                for depth, row in parts.items():
                    sizes = {"device": name, "layers_per_step": layers, "batch": batch, "depth": depth}
                    rows.append(sizes | {"gain": gain} | row)
                    shown = [f"{row[part]:.0f}" for part in PARTS]
                    table.add_row(name, str(layers), str(batch), str(depth), *shown, f"{gain:.2f}" if depth else "")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
