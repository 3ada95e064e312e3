"""Compares the log probabilities of an engine with those of a trainer's forward pass, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.chat.requests import Prompt
from jinfercept.cpu_kernels.ordered_attention import KEYS, visible, whole_attention
from jinfercept.errors import ConfigError, shown
from jinfercept.llm import LLM
from jinfercept.models.adapted import without_adapters
from jinfercept.models.joined_weights import join_layer, separate_layer
from jinfercept.models.model import Model
from jinfercept.models.protocol import MixedModel, Params, ServedModel, states_of
from jinfercept.outputs import RequestOutput
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.runner.steps import kinds_of
from jinfercept.sampling_params import SamplingParams

type Forward = Callable[[Int32[np.ndarray, "T"]], Any]
"""A forward pass: from the tokens of one sequence, log probabilities of the next token after each (`[T]`, or `[T - 1]`), or
logits (`[T, V]`)."""
TOOL_TOKENS = 5
"""Tokens that the tool of the check returns."""


class CheckedRequest(NamedTuple):
    """One sequence. The log probabilities have an entry for each of `tokens[1:]`."""

    tokens: Int32[np.ndarray, "T"]  # prompt, generated tokens and the tool's
    engine: Float32[np.ndarray, "predictions"]  # NaN where the engine has none (the tool's tokens)
    forward: Float32[np.ndarray, "predictions"]
    generated_from: int  # first position of a generated token
    paused_from: int  # first position of the tool's tokens; the number of tokens where nothing paused

    @property
    def positions(self) -> Int32[np.ndarray, "compared"]:
        """Positions in `tokens` of the tokens for which both have log probabilities."""
        return (np.flatnonzero(~np.isnan(self.engine)) + 1).astype(np.int32)

    def differences(self) -> Float32[np.ndarray, "compared"]:
        """Engine less forward pass, at `positions`; infinite where the forward pass is not a number."""
        difference = self.engine[self.positions - 1] - self.forward[self.positions - 1]
        return np.where(np.isnan(difference), np.inf, difference).astype(np.float32)


class Differences(NamedTuple):
    """The differences of a part of the tokens. A ratio is the larger probability over the smaller: `exp(abs(engine -
    forward))`."""

    num_tokens: int
    equal: float  # share of tokens with the same bits
    largest: float  # absolute difference of two log probabilities
    ratio_p50: float
    ratio_p99: float
    ratio_max: float

    @classmethod
    def of(cls, differences: Float32[np.ndarray, "compared"]) -> "Differences":
        """The summary; of no tokens, all are equal."""
        if not len(differences):
            return cls(0, 1.0, 0.0, 1.0, 1.0, 1.0)
        sizes = np.abs(differences.astype(np.float64))
        with np.errstate(over="ignore"):
            ratios = np.exp(np.quantile(sizes, (0.5, 0.99, 1.0), method="nearest"))
        return cls(len(sizes), float(np.mean(sizes == 0)), float(sizes.max()), *map(float, ratios))


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """The result of `check_logprobs`."""

    requests: tuple[CheckedRequest, ...]
    total: Differences
    # of the prompts' tokens, of those generated before a pause, and of those behind one
    parts: dict[str, Differences]
    tolerance: float  # absolute difference beyond which a token counts as different
    # a request's index and the position of its first token beyond the tolerance, of the request where it comes first; None:
    # none
    first: tuple[int, int] | None
    # where the differences beyond the tolerance begin, in words; "": nowhere
    begins: str

    def __str__(self) -> str:
        lines = [
            f"{'tokens':<16}{'number':>8}{'same bits':>11}{'largest difference':>20}{'ratio p50':>12}{'p99':>12}{'max':>12}"
        ]
        for name, part in {**self.parts, "all": self.total}.items():
            ratios = "".join(f"{ratio:>12.6f}" for ratio in part[3:])
            lines.append(f"{name:<16}{part.num_tokens:>8,}{part.equal:>11.1%}{part.largest:>20.2e}{ratios}")
        if self.first is None:
            last = f"No token differs by more than {self.tolerance:g}."
        else:
            request, position = self.first
            last = f"Beyond {self.tolerance:g} first at position {position} of request {request}: {self.begins}."
        return "\n".join([*lines, last])


def check_logprobs(
    llm: LLM,
    forward: Forward,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_tokens: int = 24,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> LogprobReport:
    """Compare the log probabilities that an engine reports with those of a trainer's forward pass of the same tokens.

    Every prompt is continued greedily and drawn, each with a pause for a tool in the middle and without one, all in one
    batch. Then `forward` is called with each sequence, without padding. No other request may run meanwhile.

    Args:
        prompts: as for `generate`; None: six of random tokens, from one token to 300, if so many fit.
        max_tokens: generated for each.
        tolerance: absolute difference of log probabilities that the report looks for.

    Raises:
        ConfigError: `forward` returned another shape.
        RequestError: a prompt does not fit.
    """
    if not callable(forward):
        raise ConfigError("forward is a function of token ids", got=shown(forward), fix="forward=lambda ids: …")
    if prompts is None:
        prompts = _random_prompts(llm, max_tokens, seed)
    requests = tuple(_checked(output, forward) for output in _generate(llm, prompts, max_tokens, seed))
    places = [(request.positions, request) for request in requests]
    names = [
        np.where(at < request.generated_from, 0, np.where(at < request.paused_from, 1, 2)) for at, request in places
    ]
    differences, part = np.concatenate([request.differences() for request in requests]), np.concatenate(names)
    parts = {
        name: Differences.of(differences[part == index])
        for index, name in enumerate(("prompt", "generated", "behind a pause"))
    }
    beyond = [request.positions[np.abs(request.differences()) > tolerance] for request in requests]
    first = min(((int(at[0]), index) for index, at in enumerate(beyond) if len(at)), default=None)
    chunk = min(llm.config.scheduling.max_chunk_tokens or llm.shape.buckets[-1], llm.shape.buckets[-1])
    return LogprobReport(
        requests,
        Differences.of(differences),
        parts,
        tolerance,
        None if first is None else (first[1], first[0]),
        "" if first is None else _begins(requests, beyond, chunk),
    )


def _random_prompts(llm: LLM, max_tokens: int, seed: int) -> list[Prompt]:
    rng, vocab_size = np.random.default_rng(seed), llm.model.config.vocab_size
    room = llm.shape.max_model_len - max_tokens - TOOL_TOKENS
    if room < 1:
        raise ConfigError("max_tokens leaves no room for a prompt", got=max_tokens, fix="a lower max_tokens")
    lengths = sorted({min(length, room) for length in (1, 5, 33, 70, 150, 300)})
    return [{"prompt_token_ids": rng.integers(0, vocab_size, length).tolist()} for length in lengths]


def _generate(llm: LLM, prompts: Sequence[Prompt], max_tokens: int, seed: int) -> list[RequestOutput]:
    rng, vocab_size = np.random.default_rng(seed + 1), llm.model.config.vocab_size
    returned = rng.integers(0, vocab_size, TOOL_TOKENS).tolist()
    all_prompts, params, detectors = [], [], []
    for number, prompt in enumerate(prompts):
        for temperature in (0.0, 1.0):
            for pauses in (False, True):
                all_prompts.append(prompt)
                params.append(
                    SamplingParams(
                        temperature=temperature,
                        seed=seed + number,
                        max_tokens=max_tokens,
                        ignore_eos=True,
                        logprobs=0,
                        prompt_logprobs=0,
                    )
                )
                detectors.append(ScriptedDetector({max_tokens // 2: [Call("tool", "")]} if pauses else {}))
    tool = Tool(lambda _: returned, name="tool")
    return llm.generate(all_prompts, params, tools=[tool], detector=detectors)


def _checked(output: RequestOutput, forward: Forward) -> CheckedRequest:
    completion, prompt = output.outputs[0], output.prompt_token_ids
    tokens = np.array(prompt + completion.token_ids, np.int32)
    reported = [*(output.prompt_logprobs or []), *(completion.logprobs or [])][1:]
    engine = [
        np.nan if entry is None else entry[token].logprob
        for entry, token in zip(reported, tokens[1:].tolist(), strict=True)
    ]
    paused_from = len(tokens)
    if completion.interceptions:
        paused_from = len(prompt) + completion.interceptions[0].span[0]
    own = _next_logprobs(forward(tokens), tokens)
    return CheckedRequest(tokens, np.array(engine, np.float32), own, len(prompt), paused_from)


def _next_logprobs(returned: Any, tokens: Int32[np.ndarray, "T"]) -> Float32[np.ndarray, "predictions"]:
    array = np.asarray(returned)
    count = len(tokens)
    if array.ndim > 1 and array.shape[0] == 1 and count > 1:
        array = array[0]
    if array.ndim == 2 and len(array) == count and array.shape[1] > tokens.max():
        return np.asarray(jax.jit(next_logprobs)(array.astype(np.float32), tokens))
    if array.ndim == 1 and len(array) in (count, count - 1):
        return array[: count - 1].astype(np.float32)
    fix = f"[{count}] or [{count - 1}] log probabilities of the next token, or logits [{count}, vocabulary]"
    raise ConfigError("forward returned a wrong shape", got=getattr(array, "shape", shown(returned)), fix=fix)


def _begins(requests: Sequence[CheckedRequest], beyond: Sequence[np.ndarray], chunk: int) -> str:
    # the first of these descriptions that fits all requests that differ
    pairs = [(request, at) for request, at in zip(requests, beyond, strict=True) if len(at)]
    everywhere = np.concatenate([request.positions for request in requests])
    firsts = [int(at[0]) for _, at in pairs]
    least = min(firsts)
    num_beyond = sum(map(len, beyond))
    if num_beyond > 0.9 * len(everywhere):
        return "nearly all tokens differ: other weights, another scale, or another model"
    targets = {int(request.tokens[place]) for request, at in pairs for place in at}
    of_targets = sum(np.isin(request.tokens[request.positions], [*targets]).sum() for request in requests)
    if len(targets) <= 8 and of_targets == num_beyond:
        return f"the tokens {sorted(targets)} always differ, and no others: a masked or resized vocabulary"
    inputs = {int(request.tokens[place - 1]) for request, at in pairs for place in at}
    of_read = sum(np.isin(request.tokens[request.positions - 1], [*inputs]).sum() for request in requests)
    if len(inputs) <= 8 and of_read == num_beyond:
        return f"the tokens behind {sorted(inputs)} always differ, and no others: another embedding"
    if all(first >= request.paused_from for (request, _), first in zip(pairs, firsts, strict=True)):
        return "only behind a pause, from the tool's tokens on"
    if sum(everywhere >= least) <= 1.1 * num_beyond:
        return f"from position {least} on nearly all tokens differ: rotary embedding, a window, or a length"
    if all(first > 1 and (first - 1) % chunk == 0 for first in firsts):
        return f"at a border of chunks of {chunk} tokens"
    if all(first >= request.generated_from for (request, _), first in zip(pairs, firsts, strict=True)):
        return "only in what is generated, not in prompts"
    return f"{num_beyond} of {len(everywhere)} tokens, at no particular place: rounding, or another order of sums"


def forward_logits(
    model: ServedModel, params: Params, tokens: Int[Array, "T"], *, fill: int = KEYS
) -> Float[Array, "T V"]:
    """Logits after every token of one sequence. It can be traced and differentiated by `params`.

    In float32 on a CPU they are, bit for bit, those of an engine with `batch_invariant`: the sequence is filled up to a
    multiple of 256 tokens, and XLA fuses nothing across layers. Everything else is plain `jax.numpy`. Raises `ConfigError` if
    the model has recurrent layers.

    Args:
        model, params: `llm.model` with its weights, joined or apart, or a `Model` with a trainer's. Adapters add nothing.
        fill: the sequence is filled up to a multiple of this many tokens; 1: it is not.
    """
    if states_of(model):
        raise ConfigError("recurrent layers are not supported", got=model.config.family, fix="another model")
    params = jax.tree.map(jnp.asarray, without_adapters(params))
    if isinstance(model, Model):
        params = params._replace(layers=tuple(map(join_layer if model.joined else separate_layer, params.layers)))
    num_tokens = len(tokens)
    tokens = jnp.pad(jnp.asarray(tokens), (0, -num_tokens % fill))
    positions = jnp.arange(len(tokens))

    def attend(
        q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], kv: None, scoring: Scoring = PLAIN
    ) -> tuple[Float[Array, "T H D"], None]:
        return whole_attention(q, k, v, visible(positions, positions, scoring), scoring), kv

    x = model.embed(params.embed, tokens, positions)
    kinds = kinds_of(model) or (None,) * len(params.layers)
    for kind, weights in zip(kinds, params.layers, strict=True):
        layer: Any = model.layer if kind is None else partial(cast(MixedModel, model).layer, kind=kind)
        x, _ = layer(weights, jax.lax.optimization_barrier(x), positions, None, attend)
        x = jax.lax.optimization_barrier(x)  # as if each layer was compiled by itself
    return model.head(params.head, x)[:num_tokens]


def forward_logprobs(model: ServedModel, params: Params, tokens: Int[Array, "T"]) -> Float[Array, "predictions"]:
    """Log probabilities of `tokens[1:]` by `forward_logits`: of each token its logit less the logarithm of the row's sum."""
    # `jax.nn.log_softmax` of the same logits differs from it in the last bits
    return next_logprobs(forward_logits(model, params, tokens), tokens)


def next_logprobs(logits: Float[Array, "T V"], tokens: Int[Array, "T"]) -> Float[Array, "predictions"]:
    """Log probabilities of `tokens[1:]` by the logits after every token, in the order of the engine's sums."""
    count = len(logits)
    logits = jnp.pad(logits, ((0, -count % KEYS), (0, 0)))  # few rows are summed in another order
    targets = jnp.pad(jnp.asarray(tokens)[1:], (0, len(logits) - count + 1))
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return (chosen - jax.nn.logsumexp(logits, axis=-1))[: count - 1]
