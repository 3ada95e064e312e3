"""`python -m benchmarks throughput`: tokens per second by dtype, batch and context, beside other engines, with ratios.

Prompts are random tokens, generation is greedy and never ends early. Each cell prefills its prompts with empty pages and
stops at their first tokens; then the same prompts, whose pages are kept, decode.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro import conf

from benchmarks.peers.peer_script import forget_peak_memory, measure_cell, memory_gib, peak_memory_gib
from benchmarks.throughput_peers import Cell, Peer, PeerCells, ThroughputWork, measure_peer, script_peer
from jinfercept.cli.options import HOSTS, Maybe, ModelName, Repeated, Several, engine_flags
from jinfercept.config import CacheOptions, DTypeChoice, EngineConfig, EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.events import Event, Token
from jinfercept.machine import num_processors
from jinfercept.models import embedded
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.reports import check_outputs, write_json
from jinfercept.sim.tables import check_least, listed, number_text, numbers, plain_table, show
from jinfercept.startup.progress import StartDisplay
from jinfercept.version import __version__

if TYPE_CHECKING:
    from jinfercept.llm import LLM

OURS = "jinfercept"
DTYPES: tuple[DTypeChoice, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The command."""

    model: ModelName
    dtype: Several = ()
    """float32, bfloat16, or auto as of `LLM` (default: float32 and bfloat16)"""
    batch: Several = ()
    """requests at once (default: 1,8,32)"""
    context: Several = ()
    """prompt tokens (default: 32,1000)"""
    new_tokens: int = 32
    """tokens that each generates"""
    peer: Annotated[Repeated, conf.arg(metavar="NAME[=PYTHON]")] = ()
    """measure transformers, vllm or llama_cpp too, with an interpreter that has it (default: this one)"""
    json: Maybe[str] = None
    """write everything to this file"""
    engine: Annotated[
        EngineOptions,
        engine_flags("dtype", "kv_tokens", "max_num_seqs", "max_model_len", "enable_prefix_caching", *HOSTS),
    ]

    def run(self) -> int:
        """Measure, and print a table; returns 0.

        Raises:
            ConfigError: an option makes no sense, or a peer is missing or fails.
        """
        dtypes, work = self._dtypes(), self._work()
        check_outputs((("--json", self.json),))
        peers = [script_peer(peer) for peer in self.peer]
        console, measured = Console(stderr=True), list[PeerCells]()
        try:
            for name in dtypes:
                measured.append(_measure_ours(self.model, name, work, self.engine, console))
                measured += [_measure_other(peer, self.model, name, work, console) for peer in peers]
        finally:  # what there is, also if a peer fails or the user interrupts
            if measured:
                show(table(measured))
                show(memory_table(measured))
                if self.json is not None:
                    engines = [of_engine._asdict() for of_engine in measured]
                    for of_engine in engines:
                        of_engine["cells"] = [cell._asdict() for cell in of_engine["cells"]]
                    report = _machine() | {"new_tokens": self.new_tokens, "engines": engines}
                    write_json(self.json, report)
        return 0

    def _dtypes(self) -> list[DTypeChoice]:
        names = listed(self.dtype or DTYPES)
        if "auto" in names:
            from jinfercept.models.load import dtype_name
            from jinfercept.startup.backend import prepare_backend

            # before JAX starts to say what `auto` is
            prepare_backend(EngineConfig.from_options(self.engine), swap_is_given="swap_space" in self.engine)
            names = list(dict.fromkeys(map(dtype_name, names)))
        if wrong := [name for name in names if name not in DTYPES]:
            raise ConfigError("no such --dtype", got=", ".join(wrong), fix=f"auto, or one of {', '.join(DTYPES)}")
        return [dtype for name in names for dtype in DTYPES if dtype == name]

    def _work(self) -> ThroughputWork:
        batches = numbers("--batch", self.batch or ("1,8,32",), int)
        contexts = numbers("--context", self.context or ("32,1000",), int)
        for flag, value, least in (("--batch", batches[0], 1), ("--context", contexts[0], 1)):
            check_least(flag, value, least)
        check_least("--new-tokens", self.new_tokens, 2)
        return ThroughputWork(batches, contexts, self.new_tokens)


def table(measured: Sequence[PeerCells]) -> Table:
    """A row for each dtype, batch and context; how many times as fast as each peer we are."""
    peers = list(dict.fromkeys(engine_cells.engine for engine_cells in measured if engine_cells.engine != OURS))
    columns = [
        f"{what} {name}" for what in ("decode", "prefill") for name in ("", *(y for x in peers for y in (x, "×")))
    ]
    caption = f"tokens/s{'; ×: ours over the peer’s' if peers else ''}"
    shown = plain_table(("dtype", "batch", "context", *columns), caption=caption)
    for ours in (engine_cells for engine_cells in measured if engine_cells.engine == OURS):
        by_engine = {
            engine_cells.engine: {(cell.batch, cell.context): cell for cell in engine_cells.cells}
            for engine_cells in measured
            if engine_cells.dtype == ours.dtype
        }
        for cell in ours.cells:
            peer_cells = [by_engine.get(name, {}).get((cell.batch, cell.context)) for name in peers]
            row = [ours.dtype, str(cell.batch), f"{cell.context:,}"]
            for rate in ("decode_tokens_per_s", "prefill_tokens_per_s"):
                our_rate = getattr(cell, rate)
                row.append(number_text(our_rate))
                for peer_cell in peer_cells:
                    peer_rate = getattr(peer_cell, rate) if peer_cell else None
                    row += [number_text(peer_rate), f"{our_rate / peer_rate:.2f}"] if peer_rate else ["-", "-"]
            shown.add_row(*row)
    return shown


def memory_table(measured: Sequence[PeerCells]) -> Table:
    """Resident memory of each engine's process: once it is ready, and the most until its end."""
    columns = ("engine", "dtype", "ready", "most")
    shown = plain_table(columns, left=columns[:2], caption="GiB of memory of the process")
    for engine_cells in measured:
        sizes = (f"{size:.2f}" if size is not None else "-" for size in (engine_cells.rest_gib, engine_cells.peak_gib))
        shown.add_row(engine_cells.engine, engine_cells.dtype, *sizes)
    return shown


def _measure_ours(
    model: str, dtype: DTypeChoice, work: ThroughputWork, engine: EngineOptions, console: Console
) -> PeerCells:
    import jax

    from jinfercept.llm import LLM

    forget_peak_memory()
    page_size = engine.get("page_size", CacheOptions.page_size)
    options: EngineOptions = {**work.engine_options(page_size), **engine, "dtype": dtype}
    with StartDisplay() as start, LLM(model, lazy=False, progress=start, **options) as llm:
        start.close()
        rest = memory_gib("VmRSS")
        with console.status(f"{OURS}, {dtype}") as status:
            cells = measure(llm, work, lambda done, total: status.update(f"{OURS}, {dtype}: {done} of {total}"))
    return PeerCells(OURS, f"{__version__}, jax {jax.__version__}", dtype, cells, rest, peak_memory_gib(rest))


def _measure_other(peer: Peer, model: str, dtype: str, work: ThroughputWork, console: Console) -> PeerCells:
    from jinfercept.models.load import read_config

    path = str(embedded.fetch()) if model == embedded.NAME else model
    with console.status(f"{peer.name}, {dtype}"):
        return measure_peer(peer, path, dtype, work, read_config(model).vocab_size)


def _machine() -> dict[str, Any]:
    import jax

    return {
        "device": jax.local_devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "cores": num_processors(),
        "python": platform.python_version(),
    }


def measure(
    llm: "LLM", work: ThroughputWork, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Cell]:
    """Measure every cell; starts the engine over again and again, so it must be idle.

    Args:
        llm: started with `work.engine_options`; its options for prefix caching must be on.
        progress: called with the numbers of finished and of all cells.

    Raises:
        ConfigError: prefix caching is off, so prompts would be computed again before decoding.
    """
    if not llm.config.cache.enable_prefix_caching:
        raise ConfigError(
            "measuring decoding needs prefix caching", got="enable_prefix_caching=False", fix="leave prefix caching on"
        )
    places = [(batch, context) for context in work.contexts for batch in work.batches]
    cells = []
    for number, (batch, context) in enumerate(places):
        progress(number, len(places))
        cells.append(_cell(llm, batch, context, work.new_tokens))
    llm.restart()
    progress(len(places), len(places))
    return cells


def _cell(llm: "LLM", batch: int, context: int, new_tokens: int) -> Cell:
    """The best of some rounds, each with prompts of its own, computed before on pages that are dropped."""

    def generate(prompts: list[list[int]], count: int) -> list[list[float]]:
        if count == 1:  # the prompts' pages are kept for the decoding that follows
            llm.restart()
        return token_times(llm, [{"prompt_token_ids": prompt} for prompt in prompts], count)[0]

    vocab_size = llm.model.config.vocab_size
    return Cell(batch, context, *measure_cell(generate, batch, context, new_tokens, vocab_size))


def token_times(
    llm: "LLM", prompts: list[dict[str, Any]], new_tokens: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Seconds from now to each of every request's tokens, and the tokens. Greedy, without an early end."""
    times: dict[str, list[float]] = {}

    def note(event: Event) -> None:
        if isinstance(event, Token):
            times.setdefault(event.request_id, []).append(time.perf_counter() - began_s)

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, on_event=note)  # pyright: ignore[reportArgumentType]
    return list(times.values()), [output.outputs[0].token_ids for output in outputs]
