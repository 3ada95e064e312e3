"""`python -m benchmarks logprobs MODEL`: how far an engine's log probabilities are from a trainer's, beside how far a trainer's
are from its own with sequences of another padded length; and what `batch_invariant` costs.

The trainer is `jinfercept.testing.forward_logits` with attention of whole sequences, in the engine's type. Ratios are of two
probabilities of a generated token, the larger over the smaller one.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from jinfercept.llm import LLM
from jinfercept.logprob_check import forward_logits, next_logprobs
from jinfercept.models.protocol import Params, ServedModel
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.reports import TextTable

NUM_PROMPTS = 8
"""Drawn together, of 10 to 150 random tokens."""


class Row(NamedTuple):
    """Differences of log probabilities of the same tokens."""

    dtype: str
    compared: str
    differences: np.ndarray

    def cells(self) -> list[str]:
        """Of the table."""
        sizes = np.abs(self.differences)
        ratios = np.exp(np.quantile(sizes, (0.5, 0.99, 1.0)))
        return [
            self.dtype,
            self.compared,
            f"{len(sizes):,}",
            f"{np.mean(sizes == 0):.1%}",
            *(f"{r:.7f}" for r in ratios),
        ]


def measure(model: str, new_tokens: int, plot: str | None, options: Mapping[str, Any]) -> list[Row]:
    """The rows, printed as a table too, with the price of `batch_invariant`.

    Args:
        new_tokens: generated for each prompt.
        plot: a file for the picture, or None.
        options: of the engine.
    """
    rows, speeds = list[Row](), dict[str, float]()
    for dtype, invariant in (("float32", False), ("float32", True), ("bfloat16", False)):
        name = f"{dtype}, batch_invariant" if invariant else dtype
        flags = {"quantization": "none", "tool_lora": "", "max_num_seqs": NUM_PROMPTS, "max_model_len": 512, **options}
        with LLM(model, dtype=dtype, batch_invariant=invariant, **flags) as llm:  # pyright: ignore[reportArgumentType]
            sequences, engine, speeds[name] = _generate(llm, new_tokens)
            params = llm.params
            short, long = (_trainer(llm.model, params, sequences, size) for size in (256, 320))
        masks = [np.arange(len(tokens) - 1) >= len(tokens) - 1 - new_tokens for tokens in sequences]

        def differences(
            ours: list[np.ndarray], theirs: list[np.ndarray], masks: list[np.ndarray] = masks
        ) -> np.ndarray:
            pairs = zip(ours, theirs, masks, strict=True)
            return np.concatenate([(a - b)[mask] for a, b, mask in pairs]).astype(np.float64)

        rows.append(Row(name, "engine, trainer", differences(engine, short)))
        rows.append(Row(name, "trainer at 256, at 320 tokens", differences(short, long)))
    columns = ("dtype", "compared", "tokens", "same bits", "ratio p50", "p99", "max")
    Console(width=130).print(TextTable(f"{model}: generated tokens", columns, [row.cells() for row in rows]).shown())
    on, off = speeds["float32, batch_invariant"], speeds["float32"]
    print(f"batch_invariant: {on:.0f} tokens/s beside {off:.0f} without it, {on / off:.2f} times")
    if plot:
        _draw(rows, plot)
    return rows


def _generate(llm: LLM, new_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Sequences, the engine's log probabilities of all but their first tokens, and generated tokens a second."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(10, 150, NUM_PROMPTS).astype(int)
    prompts = [{"prompt_token_ids": rng.integers(0, llm.model.config.vocab_size, n).tolist()} for n in lengths]

    def run(prompt_logprobs: int | None) -> list[Any]:
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=prompt_logprobs
        )
        return llm.generate(prompts, params)  # pyright: ignore[reportArgumentType]

    outputs = run(0)
    assert llm.reset_prefix_cache()
    began_s = time.perf_counter()
    run(None)
    speed = NUM_PROMPTS * new_tokens / (time.perf_counter() - began_s)
    sequences, logprobs = list[np.ndarray](), list[np.ndarray]()
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        reported = [*output.prompt_logprobs, *output.outputs[0].logprobs][1:]
        logprobs.append(np.array([r[t].logprob for r, t in zip(reported, tokens[1:], strict=True)], np.float32))
        sequences.append(np.array(tokens, np.int32))
    return sequences, logprobs, speed


def _trainer(model: ServedModel, params: Params, sequences: list[np.ndarray], size: int) -> list[np.ndarray]:
    """Log probabilities of a forward pass of every sequence, filled up to so many tokens."""

    @jax.jit
    def compute(params: Params, tokens: Any) -> Any:
        return next_logprobs(forward_logits(model, params, tokens, fill=1), tokens)

    def logprobs(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(compute(params, np.pad(tokens, (0, size - len(tokens)))))[: len(tokens) - 1]

    return [logprobs(tokens) for tokens in sequences]


def _draw(rows: list[Row], path: str) -> None:
    """The shares of tokens whose ratio is larger than a number."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        sizes = np.sort(np.abs(row.differences))[::-1]
        if sizes[0] > 0:
            axes.step(
                np.maximum(sizes, 1e-9), (np.arange(len(sizes)) + 1) / len(sizes), label=f"{row.dtype}: {row.compared}"
            )
    axes.set(
        xscale="log",
        xlim=(1e-8, 1),
        xlabel="|log ratio| of two probabilities of a token",
        ylabel="share of tokens beyond",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
