"""`python -m studies calls --real`: a model that is forced to write scripted calls, and Python tools that sleep, beside
AsyncLM's formulas.

How long writing takes is measured on the same request without tools. Reading the results is not in the formulas.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from jinfercept.calls import CallMode, Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.events import Event, Token
from jinfercept.llm import LLM
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.tables import TextTable, show
from studies.calls.alone import Row
from studies.calls.markup import CALL_MODES, forced_rounds, scripted_tokenizer, text_of
from studies.calls.scripts import DURATIONS, CallMix, CallScript, WrittenRound, formula_of_s

MIXES: Mapping[str, CallMix] = {
    name: replace(mix, decode=(36, 52), returned=(2, 6))
    for name, mix in {
        "4 calls": CallMix(4),
        "8 calls, 30% prose": CallMix(8, 0.3),
        "6 calls in 2 rounds, 50% prose": CallMix(6, 0.5, 2),
        "8 heavy-tailed calls, 30% prose": CallMix(8, 0.3, tool="heavy"),
    }.items()
}
"""The requests. Results are short: in bucketed steps a CPU takes several tokens' time to read one."""
PROMPT = "Look these things up."
WORDS = (" so", ".")
"""Prose: the first that is one token. Points are one in the scripted vocabulary; others join several of them."""


class RealLatency(NamedTuple):
    """A request that called in one way.

    Attributes:
        mix: a name of `MIXES`.
        calls: when the calls ran.
        tokens: that the model generated.
        writing_s: seconds of the same request without tools.
        formula_s: seconds by the formula.
        reading_s: seconds by which the request is longer than `writing_s` if its tools return at once: reading the results, and
            the engine's work for calls.
        latency_s: seconds that it took.
        ratio: latency over formula. All are medians of several runs, the ratio that of the ratios.
    """

    mix: str
    calls: CallMode
    tokens: int
    writing_s: float
    formula_s: float
    reading_s: float
    latency_s: float
    ratio: float


def tiny_llm() -> LLM:
    """A small Llama with random weights and the scripted vocabulary."""
    tokenizer = scripted_tokenizer()
    config = ModelConfig(
        family="llama",
        vocab_size=128,
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=768,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0, rotary_dim=64),
        tie_embeddings=False,
        max_position=4096,
        eos_token_ids=(),
        activation="silu",
    )
    return LLM(
        config,
        tokenizer=tokenizer,
        lazy=False,
        load_format="dummy",
        dtype="float32",
        kv_tokens=4096,
        max_num_seqs=1,
        max_num_batched_tokens=64,
    )


def measure_calls(
    llm: LLM, seed: int, mixes: Sequence[str], repeats: int, done: Callable[[], None]
) -> list[RealLatency]:
    """Serve a request of each mix alone, in each mode.

    Args:
        llm: serves nothing else.
        seed: of the requests.
        mixes: names of `MIXES`.
        repeats: runs of each, of which the median counts.
        done: called after each mix.
    """
    scripts = {name: MIXES[name].draw(Random(f"{seed} {name}")) for name in mixes}
    for script in scripts.values():  # what is imported or made at first use
        _serve(llm, script._replace(rounds=script.rounds[:1]), "async")
    latencies = list[RealLatency]()
    for name, script in scripts.items():
        rounds, turns = _rounds(llm, script), [_serve_all(llm, script) for _ in range(repeats)]
        for mode in CALL_MODES:
            formulas = [formula_of_s(mode, rounds, len(turn.ends_s) - 1, turn.ends_s.__getitem__) for turn in turns]
            latencies.append(
                RealLatency(
                    name,
                    mode,
                    tokens=len(turns[0].ends_s) - 1,
                    writing_s=median(turn.ends_s[-1] for turn in turns),
                    formula_s=median(formulas),
                    reading_s=max(0.0, median(turn.at_once_s[mode] - turn.ends_s[-1] for turn in turns)),
                    latency_s=median(turn.latency_s[mode] for turn in turns),
                    ratio=median(
                        turn.latency_s[mode] / formula_s for turn, formula_s in zip(turns, formulas, strict=True)
                    ),
                )
            )
        done()
    return latencies


class _Turn(NamedTuple):
    """A request served in every way, one right after another: what slows the machine for a while slows all of them.

    Attributes:
        ends_s: seconds until so many tokens are written, from 0 on, without tools.
        latency_s: seconds until the last token, by mode.
        at_once_s: the same with tools that return at once.
    """

    ends_s: list[float]
    latency_s: Mapping[CallMode, float]
    at_once_s: Mapping[CallMode, float]


def _serve_all(llm: LLM, script: CallScript) -> _Turn:
    ends_s = [0.0, *_serve(llm, script, None)]
    latency_s, at_once_s = dict[CallMode, float](), dict[CallMode, float]()
    for mode in CALL_MODES:
        latency_s[mode] = _serve(llm, script, mode)[-1]
        at_once_s[mode] = _serve(llm, script, mode, waits=False)[-1]
    return _Turn(ends_s, latency_s, at_once_s)


def _rounds(llm: LLM, script: CallScript) -> list[WrittenRound]:
    assert llm.tokenizer is not None
    [request] = llm.make_requests(PROMPT, _params(llm, script), _tools(), None, async_calls=AsyncCalls())
    return forced_rounds(request, llm.tokenizer)


def _serve(llm: LLM, script: CallScript, mode: CallMode | None, *, waits: bool = True) -> list[float]:
    """Serve a request, without tools if `mode` is None; returns the seconds until each token that the model wrote."""
    ends_s = list[float]()

    def note(event: Event) -> None:
        if isinstance(event, Token):
            ends_s.append(time.monotonic() - began_s)

    tools = [] if mode is None else _tools(waits)
    options = None if mode is None else AsyncCalls(calls=mode)
    params, began_s = _params(llm, script), time.monotonic()
    llm.generate(PROMPT, params, tools=tools, async_calls=options, on_event=note)
    return ends_s


def _params(llm: LLM, script: CallScript) -> SamplingParams:
    assert llm.tokenizer is not None
    encode = llm.tokenizer.encode
    tokens = encode(text_of(script, next(word for word in WORDS if len(encode(word)) == 1)))
    return SamplingParams(temperature=0.0, max_tokens=len(tokens), forced_output_ids=tokens, ignore_eos=True)


def _tools(waits: bool = True) -> list[Tool]:
    def work(seconds: float, tokens: int) -> str:
        """Takes its time."""
        time.sleep(seconds if waits else 0.0)
        return "r" * tokens

    return [Tool(work, name=name) for name in DURATIONS]


REPEATS = 5


def run_real(model: str | None, seed: int, *, quick: bool) -> tuple[TextTable, list[Row]]:
    """Measure, and print a table.

    Args:
        model: as `LLM`; None: a tiny one with random weights.
        seed: of the requests.
        quick: two mixes, once each.

    Returns:
        The table, and its rows as JSON values.

    Raises:
        ModelError: the model cannot be loaded.
    """
    mixes, repeats = (list(MIXES)[:2], 1) if quick else (list(MIXES), REPEATS)
    with closing(_load(model)) as llm, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("in real time", total=len(mixes))
        latencies = measure_calls(llm, seed, mixes, repeats, lambda: progress.advance(task))
    table = real_table(latencies)
    show(table.shown())
    return table, [latency._asdict() for latency in latencies]


def _load(model: str | None) -> LLM:
    if model is None:
        return tiny_llm()
    return LLM(model, lazy=False, kv_tokens=4096, max_num_seqs=1, max_num_batched_tokens=64)


def real_table(latencies: list[RealLatency]) -> TextTable:
    """A row for each request and way to call."""
    sync_s = {latency.mix: latency.latency_s for latency in latencies if latency.calls == "sync"}
    rows = [
        [
            latency.mix,
            latency.calls,
            str(latency.tokens),
            f"{1e3 * latency.writing_s / latency.tokens:.1f}",
            f"{latency.formula_s:.3f}",
            f"{latency.latency_s:.3f}",
            f"{latency.ratio - 1:+.1%}",
            f"{latency.reading_s:.3f}",
            f"{sync_s[latency.mix] / latency.latency_s:.2f}",
        ]
        for latency in latencies
    ]
    columns = (
        "request",
        "calls",
        "tokens",
        "ms/token",
        "formula s",
        "measured s",
        "difference",
        "reading s",
        "sync over it",
    )
    return TextTable("One request alone in real time, with tools that sleep.", columns, rows)
