"""`python -m benchmarks COMMAND`: measurements of engines and servers, and reports of the suites of GPUs and TPUs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from jinfercept.cli.command import Entry, run_command_line
from jinfercept.cli.options import HOSTS, Files, Maybe, ModelName, Several, Switch, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.sim.reports import check_least, numbers

COMMANDS: Mapping[str, Entry] = {
    "throughput": Entry(
        "benchmarks.throughput:Throughput",
        "decode and prefill tokens per second by batch and context, beside other engines",
    ),
    "agents": Entry("benchmarks.agents:Agents", "coding agents by lengths of real sessions: turns, cached tokens"),
    "foreign": Entry(
        "benchmarks.foreign:Foreign",
        "benchmarks of others on a server of this project, with their counts beside its own",
    ),
    "hybrid-turns": Entry(
        "benchmarks.hybrid_turns:HybridTurns", "prompt tokens that hybrid models find, beside a Llama of the same pages"
    ),
    "hints": Entry("benchmarks.hints:Hints", "what hints of clients change for coding agents, simulated and served"),
    "fleet": Entry(
        "benchmarks.__main__:FleetLoad", "sessions without keys on replicas: tokens found, by way of routing"
    ),
    "copying": Entry(
        "benchmarks.copying:Copying", "decode tokens per second with and without drafts, on prompts that are copied"
    ),
    "kv-dtype": Entry("benchmarks.__main__:KVDType", "perplexity and greedy tokens with quantised KV pages"),
    "lora-cost": Entry("benchmarks.__main__:LoraCost", "a decode step with adapters beside the same step without them"),
    "logprobs": Entry(
        "benchmarks.__main__:Logprobs", "log probabilities beside a trainer's, and the price of the same bits"
    ),
    "weights": Entry("benchmarks.__main__:Weights", "an update of the weights: seconds, memory, and growth over many"),
    "gpu-report": Entry(
        "benchmarks.__main__:GpuReport", "files of tools/gpu_suite and tools/tpu_suite as one table against the aims"
    ),
    "gpu-bill": Entry("benchmarks.__main__:GpuBill", "what a step costs a GPU, read from code compiled ahead of time"),
    "tpu-bill": Entry("benchmarks.__main__:TpuBill", "what a step costs a TPU, read from code compiled ahead of time"),
}


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """The command."""

    replicas: int = 4
    """of a tiny model, on this machine"""
    sessions: int = 64
    """interleaved"""
    turns: int = 6
    """of a session"""
    system_tokens: int = 2000
    """of the system prompt that all sessions share"""
    seed: int = 0
    """of texts and pauses"""
    json: Maybe[str] = None
    """write the numbers to this file"""

    def run(self) -> int:
        """Play the sessions; returns 1 if an answer differs from one replica's, or a request fails."""
        from benchmarks.fleet import FleetShape, fleet_command
        from jinfercept.sim.reports import check_least

        for name in ("replicas", "sessions", "turns"):
            check_least(f"--{name}", getattr(self, name), 1)
        shape = FleetShape(self.replicas, self.sessions, self.turns, self.system_tokens)
        return fleet_command(shape, self.seed, self.json)


@dataclass(frozen=True, kw_only=True)
class KVDType:
    """The command."""

    model: ModelName
    windows: int = 16
    """of the text that Python ships"""
    window_tokens: int = 512
    """of each"""
    new_tokens: int = 32
    """written greedily after each"""
    int8_activations: bool = False
    """measure activations that are rounded to int8 too; the model has quantised weights"""
    engine: Annotated[EngineOptions, engine_flags("kv_cache_dtype", "activation_dtype", *HOSTS)]

    def run(self) -> int:
        """Measure; returns 0. Raises `ConfigError` if the options make no sense."""
        from benchmarks.kv_dtype import KVDTypeBench, kv_dtype_command
        from jinfercept.sim.reports import check_least

        for name, least in (("windows", 1), ("window_tokens", 2), ("new_tokens", 1)):
            check_least("--" + name.replace("_", "-"), getattr(self, name), least)
        return kv_dtype_command(
            KVDTypeBench(
                self.model,
                self.windows,
                self.window_tokens,
                self.new_tokens,
                self.int8_activations,
                self.engine,  # pyright: ignore[reportArgumentType]
            )
        )


@dataclass(frozen=True)
class LoraCost:
    """The command."""

    model: ModelName
    engine: Annotated[EngineOptions, engine_flags("loras", "max_loras", "max_lora_rank", "tool_lora", *HOSTS)]
    adapters: int = 8
    """that there are, all in use"""
    rank: int = 16
    """of each"""
    rows: Several = ()
    """of a step, each with a token of its own (default: 8,32)"""

    def run(self) -> int:
        """Measure; returns 0. Raises `ConfigError` for sizes below 1."""
        from benchmarks.lora_cost import Sizes, measure

        rows = numbers("--rows", self.rows, int) or (8, 32)
        if min(self.adapters, self.rank, *rows) < 1:
            got, fix = f"{self.adapters} adapters of rank {self.rank}, rows {rows}", "1 or more of each"
            raise ConfigError("sizes are at least 1", got=got, fix=fix)
        measure(self.model, Sizes(self.adapters, self.rank, tuple(rows)), self.engine)
        return 0


@dataclass(frozen=True)
class Weights:
    """The command."""

    model: ModelName
    engine: Annotated[EngineOptions, engine_flags("quantization", "loras", "max_loras", "tool_lora", *HOSTS)]
    updates: int = 200
    """behind each other, to see whether memory grows"""

    def run(self) -> int:
        """Measure; returns 0. Raises `ConfigError` for a number below 5."""
        from benchmarks.weights_cost import measure

        check_least("--updates", self.updates, 5)
        measure(self.model, self.updates, self.engine)
        return 0


@dataclass(frozen=True)
class Logprobs:
    """The command."""

    model: ModelName
    engine: Annotated[EngineOptions, engine_flags("dtype", "batch_invariant", *HOSTS)]
    new_tokens: int = 64
    """generated for each of eight prompts, at most 100"""
    plot: Maybe[str] = None
    """file for a picture of the ratios"""

    def run(self) -> int:
        """Measure; returns 0. Raises `ConfigError` for sizes that do not fit."""
        from benchmarks.logprobs import measure

        if not 1 <= self.new_tokens <= 100:
            raise ConfigError("--new-tokens is out of range", got=self.new_tokens, fix="1 to 100")
        measure(self.model, self.new_tokens, self.plot, self.engine)
        return 0


@dataclass(frozen=True)
class GpuReport:
    """The command."""

    files: Files
    """what tools/gpu_suite and tools/tpu_suite have written"""

    def run(self) -> int:
        """Print the tables; returns 0."""
        from benchmarks.gpu_report import gpu_report

        if not self.files:
            raise ConfigError(
                "there is nothing to report",
                got="no FILE",
                fix="name what tools/gpu_suite or tools/tpu_suite has written",
            )
        return gpu_report(self.files)


@dataclass(frozen=True, kw_only=True)
class GpuBill:
    """The command."""

    full: Switch = False
    """compile every model, number of rows, GPU and way of multiplying (default: a set of a few minutes)"""
    sample: Switch = False
    """compile one bucket of one model only"""
    model: Several = ()
    """compile only gemma-4-31b or gemma-4-26b-a4b on an H100, for 1 and 64 rows; repeatable"""
    check: Switch = False
    """compare with benchmarks/gpu_bill/budgets.toml; the exit status is 1 if a budget is broken"""
    set_budgets: Switch = False
    """write what was compiled into benchmarks/gpu_bill/budgets.toml, with --full"""
    out: Maybe[str] = None
    """write the bill to this JSON file"""

    def run(self) -> int:
        """Make the bill; returns the exit status."""
        from benchmarks.gpu_bill.bill import gpu_bill
        from benchmarks.gpu_bill.cases import KIND_MODELS

        if self.full + self.sample + bool(self.model) > 1:
            raise ConfigError("--full, --sample and --model exclude each other", got="several", fix="give one")
        if unknown := [name for name in self.model if name not in KIND_MODELS]:
            raise ConfigError(
                "the bill has no such model", got=", ".join(unknown), fix=f"one of {', '.join(KIND_MODELS)}"
            )
        if self.set_budgets and not self.full:
            raise ConfigError("--set-budgets needs every case", got="a part of them", fix="give --full")
        return gpu_bill(
            full=self.full,
            sample=self.sample,
            models=self.model,
            check=self.check,
            set_budgets=self.set_budgets,
            out=self.out,
        )


@dataclass(frozen=True, kw_only=True)
class TpuBill:
    """The command."""

    sample: Switch = False
    """compile a few executables of one model only"""
    tpu: Several = ()
    """generation, of v4, v5e, v5p, v6e and tpu7x; repeatable (default: all)"""
    check: Switch = False
    """compare with benchmarks/tpu_bill/budgets.toml; the exit status is 1 if a budget is broken"""
    set_budgets: Switch = False
    """write what was compiled into benchmarks/tpu_bill/budgets.toml"""
    out: Maybe[str] = None
    """write the bill to this JSON file"""

    def run(self) -> int:
        """Make the bill; returns the exit status. Raises `ConfigError` for an unknown generation."""
        from benchmarks.tpu_bill.bill import tpu_bill
        from benchmarks.tpu_bill.cases import TPUS

        if unknown := [name for name in self.tpu if name not in TPUS]:
            raise ConfigError("no such generation of TPUs", got=", ".join(unknown), fix=f"one of {', '.join(TPUS)}")
        names = self.tpu or TPUS
        return tpu_bill(sample=self.sample, check=self.check, set_budgets=self.set_budgets, tpus=names, out=self.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as `jinfercept` does."""
    words = sys.argv[1:] if argv is None else argv
    return run_command_line("python -m benchmarks", "Measurements for the makers of jinfercept.", COMMANDS, words)


if __name__ == "__main__":
    sys.exit(main())
