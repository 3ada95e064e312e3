"""`python -m benchmarks kv-dtype MODEL`: what quantised KV pages cost in perplexity and in tokens, and what they save in bytes.

With `--int8-activations` also what `--activation-dtype int8` costs, with pages of the model's dtype.

The text is the language reference that Python ships as `pydoc_data.topics`. Every window of it is a prompt of its own, computed
in chunks over the pages of the format, so that all of its attention reads quantised keys and values.

Columns: bytes of a token's keys and values; how many times the contexts the same memory holds; perplexity; its change; places
whose likeliest token is the one with pages of the model's dtype; windows whose greedy continuation is.
"""

import math
from pydoc_data.topics import topics
from typing import NamedTuple

from rich.console import Console

from jinfercept.config import KVDTypeChoice, LLMOptions
from jinfercept.llm import LLM
from jinfercept.sampling_params import SamplingParams
from jinfercept.sim.reports import TextTable

FORMATS: tuple[KVDTypeChoice, ...] = ("auto", "int8", "fp8")
INT8_ACTIVATIONS = "auto, int8 activations"


class KVDTypeBench(NamedTuple):
    """The measurement.

    Attributes:
        model: as for `jinfercept serve`.
        windows: of the text.
        window_tokens: of each.
        new_tokens: written greedily after each.
        int8_activations: whether to measure these too.
        options: of the engine.
    """

    model: str
    windows: int
    window_tokens: int
    new_tokens: int
    int8_activations: bool
    options: LLMOptions

    def measure(self, kv_cache_dtype: KVDTypeChoice, *, int8_activations: bool = False) -> "Measured":
        """Score the text and continue it with pages of this format."""
        longest = self.window_tokens + self.new_tokens
        sizes: LLMOptions = {
            "max_model_len": longest,
            "max_num_seqs": 8,
            "kv_tokens": 16 * longest,
            "kv_cache_dtype": kv_cache_dtype,
            "activation_dtype": "int8" if int8_activations else "auto",
        }
        with LLM(self.model, **(sizes | self.options)) as llm:  # pyright: ignore[reportArgumentType]
            text = "\n\n".join(topics[name] for name in sorted(topics))
            assert llm.tokenizer is not None
            tokens = llm.tokenizer.encode(text[: 8 * self.windows * self.window_tokens])
            starts = range(0, self.windows * self.window_tokens, self.window_tokens)
            prompts = [{"prompt_token_ids": tokens[start : start + self.window_tokens]} for start in starts]
            params = SamplingParams(temperature=0.0, max_tokens=self.new_tokens, ignore_eos=True, prompt_logprobs=1)
            outputs = llm.generate(prompts, params)  # pyright: ignore[reportArgumentType]
            own: list[float] = []
            first: list[int] = []
            for output in outputs:
                assert output.prompt_logprobs is not None
                for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
                    if logprobs is not None:
                        own.append(logprobs[token].logprob)
                        first.append(max(logprobs.items(), key=lambda each: each[1].logprob)[0])
            return Measured(
                INT8_ACTIVATIONS if int8_activations else kv_cache_dtype,
                llm.profile.kv_bytes_per_token,
                math.exp(-sum(own) / len(own)),
                first,
                [output.outputs[0].token_ids for output in outputs],
            )


class Measured(NamedTuple):
    """What one format gave.

    Attributes:
        token_bytes: of one token's keys and values.
        perplexity: of the text.
        first: the likeliest token at every place of the text.
        written: the greedy tokens after every window.
    """

    name: str
    token_bytes: int
    perplexity: float
    first: list[int]
    written: list[list[int]]

    def row(self, auto: "Measured") -> list[str]:
        """Of the table, compared with pages of the model's dtype."""
        pairs = list(zip(self.first, auto.first, strict=True))
        alike = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
        same = sum(ours == theirs for ours, theirs in zip(self.written, auto.written, strict=True))
        return [
            self.name,
            f"{self.token_bytes:,}",
            f"{auto.token_bytes / self.token_bytes:.2f}",
            f"{self.perplexity:.4f}",
            f"{self.perplexity / auto.perplexity - 1:+.3%}",
            f"{alike:.2%}",
            f"{same} of {len(self.written)}",
        ]


def kv_dtype_command(bench: KVDTypeBench) -> int:
    """Print the table; returns 0."""
    measured = [bench.measure(name) for name in FORMATS]
    if bench.int8_activations:
        measured.append(bench.measure("auto", int8_activations=True))
    columns = ("pages", "bytes", "contexts", "perplexity", "change", "likeliest", "runs")
    title = (
        f"{bench.model}: {len(measured[0].first):,} places of pydoc_data.topics in windows of {bench.window_tokens} tokens, "
        f"each continued by {bench.new_tokens}"
    )
    Console().print(TextTable(title, columns, [each.row(measured[0]) for each in measured]).shown())
    return 0
