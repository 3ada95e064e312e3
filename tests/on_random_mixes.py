"""Random mixes of requests on engines that are short of everything; `test_several_devices.py` runs this file.

Every output has the tokens that its request has alone in a plain engine with room: no drafts, no evictions, one device. What
happened on the way is counted, and each count must be above 0: a mix that exercises nothing would show nothing.

`MIXES_SECONDS` is for how long the slow test goes on, `MIXES_SEED` its first mix.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.calls import Call
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.session import random_key
from jinfercept.engine.streaming import Stream, serve
from jinfercept.events import Finished, Interrupted, Resumed, Token
from jinfercept.llm import LLM
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from tests.support.fake_engine import POLICIES
from tests.support.request_mixes import KINDS, TOKENIZER, MixedRequest, draw_mix
from tests.support.sampling_reference import shaped
from tests.support.tiny_model import TOOL, tiny_setup

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 100, "tokenizer": TOKENIZER}
SIZES |= {"profile": "roofline-llama-13b-a100"}  # a step with a few more tokens takes hardly longer there
ROOMY: dict[str, Any] = SIZES | {
    "kv_tokens": 1024,
    "policy": "preserve",
    "pipeline_depth": 0,
    "enable_prefix_caching": False,
}
TIGHT: dict[str, Any] = SIZES | {"speculative_config": DRAFTS}
ENGINES: dict[str, dict[str, Any]] = {
    "two devices": {"kv_tokens": 112, "page_size": 4, "tensor_parallel_size": 2, "devices": "0,1"},
    "large pages": {"kv_tokens": 128, "page_size": 16, "layers_per_step": 1, "devices": "2"},
    "int8": {"kv_tokens": 112, "page_size": 4, "kv_cache_dtype": "int8", "devices": "3"},
    "disk": {"kv_tokens": 112, "page_size": 4, "devices": "4,5", "tensor_parallel_size": 2, "kv_disk": "a folder"},
}
"""Little more than the longest sequence. The one with a disk starts over between two turns."""
COUNTED = (
    *("evictions", "copies back", "interceptions", "drafts accepted", "drafts refused", "updates"),
    *("outputs of several", "drawn tokens", "constrained tokens", "constrained tokens with drafts"),
    *("asynchronous results", "calls by stop strings", "calls by tokens", "follow-ups on retained contexts"),
    *("streams", "clients that left", "reports", "scores", "stop strings"),
)
SEED = 1
"""Of the mix in an ordinary run, in which all of `COUNTED` happens. Preemptions depend on when requests arrive."""


class Mixes:
    """The engines, the counts, and the weights that all of them have at the moment."""

    def __init__(self, names: Iterable[str], ends: ExitStack) -> None:
        self.roomy = {
            dtype: ends.enter_context(LLM(tiny_setup(**ROOMY | {"kv_cache_dtype": dtype})))
            for dtype in dict.fromkeys(ENGINES[name].get("kv_cache_dtype", "auto") for name in names)
        }
        folder = ends.enter_context(TemporaryDirectory())
        disk = {"kv_disk": folder, "kv_disk_space": 0.001}
        self.tight = {
            name: ends.enter_context(
                LLM(tiny_setup(**TIGHT | ENGINES[name] | (disk if "kv_disk" in ENGINES[name] else {})))
            )
            for name in names
        }
        first = next(iter(self.roomy.values()))
        whole = untied(first.model.config, separate(first.params))  # pyright: ignore[reportArgumentType]
        embed, layers, head = jax.tree.map(np.asarray, whole)
        self.weights = [Params(embed, layers, head), Params(embed, layers[::-1], head)]
        self.counts = Counter[str](dict.fromkeys(COUNTED, 0))
        self.ties = self.outputs = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{self.outputs} outputs, {self.ties} ties, {counts}"

    def run(self, seed: int, number: int) -> None:
        """One mix, two turns, on every engine, with weights by the seed."""
        rng = Random(seed)
        mix = draw_mix(rng, number)
        expected = dict[tuple[str, int, int], RequestOutput]()
        for engine in (*self.roomy.values(), *self.tight.values()):
            engine.update_weights(self.weights[seed % len(self.weights)])
            self.counts["updates"] += 1
        for name, llm in self.tight.items():
            policy = rng.choice([*POLICIES])
            llm.restart(
                policy=policy,
                pipeline_depth=rng.randrange(2),
                max_chunk_tokens=rng.choice([None, 3, 7]),
                swap_space=rng.choice([0.0002 if "kv_disk" in ENGINES[name] else 0, 0.0002, 0.001]),
                preemption=rng.choice(["policy", "auto", "recompute", "swap"]),
                enable_prefix_caching=rng.random() < 0.8 or "kv_disk" in ENGINES[name],
                speculative_config=DRAFTS if rng.random() < 0.8 else None,
            )
            self.counts[name] += 1
            self.counts[f"policy {policy}"] += 1
            try:
                self._check(llm, ENGINES[name].get("kv_cache_dtype", "auto"), mix, expected)
            except AssertionError as error:
                error.add_note(f"mix {seed} of {number} requests on {name}: {llm.engine.setup.config.scheduling}")
                raise
            self._count(llm)

    def _check(
        self, llm: LLM, dtype: str, mix: list[MixedRequest], expected: dict[tuple[str, int, int], RequestOutput]
    ) -> None:
        groups = [_requests(llm, mixed) for mixed in mix]
        outputs = _serve(llm, mix, groups)
        again = list[tuple[MixedRequest, Request]]()
        for place, (mixed, group) in enumerate(zip(mix, groups, strict=True)):
            for index, request in enumerate(group):
                output = outputs[request.id]
                self.counts["clients that left"] += output.outputs[0].finish_reason == "abort"
                key = dtype, place, index
                self._compare(mixed, request, output, dtype, expected, key)
                if request.follow_up is not None and output.outputs[0].finish_reason in ("stop", "length"):
                    again.append((mixed, _next_turn(llm, request, output)))
        if llm.disk is not None:
            llm.restart()
        turns = serve(llm.engine.thread, [request for _, request in again])
        for (mixed, request), output in zip(again, turns, strict=True):
            self.counts["follow-ups on retained contexts"] += output.retained is not None
            self._compare(mixed._replace(kind="plain", async_calls=None), request, output, dtype, {}, (dtype, 0, 0))

    def _compare(
        self,
        mixed: MixedRequest,
        request: Request,
        output: RequestOutput,
        dtype: str,
        expected: dict[tuple[str, int, int], RequestOutput],
        key: tuple[str, int, int],
    ) -> None:
        """The output is what its request has alone; of one whose client left, as far as it goes."""
        ours = output.outputs[0]
        roomy = self.roomy[dtype]
        if mixed.async_calls is not None:
            alone = _alone(roomy, _with_results(request, ours))
        elif key in expected:
            alone = expected[key]
        else:
            alone = expected[key] = _alone(roomy, request)
        theirs = alone.outputs[0]
        left = ours.finish_reason == "abort"
        self.outputs += 1
        _count_output(self.counts, mixed, request, output)
        if ours.token_ids != (theirs.token_ids[: len(ours.token_ids)] if left else theirs.token_ids):
            self._check_tie(roomy, dtype, request, ours, theirs)
        elif not left:
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
            assert mixed.async_calls is not None or ours.text == theirs.text
            _check_reports(output, alone, 1e-3 if dtype == "auto" else 0.1)

    def _check_tie(
        self, roomy: LLM, dtype: str, request: Request, ours: CompletionOutput, theirs: CompletionOutput
    ) -> None:
        """The two tokens where the outputs part are equally good within rounding."""
        place = next(
            (i for i, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)) if pair[0] != pair[1]),
            None,
        )
        assert place is not None, f"{ours} is not as long as {theirs}"
        margin = _margin(roomy, request, ours, place, (ours.token_ids[place], theirs.token_ids[place]))
        again = _alone(roomy, request).outputs[0]
        assert abs(margin) < (1e-4 if dtype == "auto" else 1e-2), (
            f"{request}: token {place} is better by {margin} than that of the plain engine; {ours.token_ids}, "
            f"alone {theirs.token_ids}, and again {again.token_ids}"
        )
        self.ties += 1

    def _count(self, llm: LLM) -> None:
        """What the engine did since its restart."""
        counters = llm.counters
        self.counts["evictions"] += counters.copied_out + counters.recomputed
        self.counts["copies back"] += counters.copied_in
        self.counts["preemptions"] += counters.preemptions
        self.counts["interceptions"] += counters.interceptions
        if llm.disk is not None:
            self.counts["bytes from disk"] = llm.disk.counters.read_bytes
        self.counts["drafts accepted"] += counters.accepted.total()
        self.counts["drafts refused"] += counters.drafted - counters.accepted.total()
        llm.engine.check_pages()


def _requests(llm: LLM, mixed: MixedRequest) -> list[Request]:
    """One for each output."""
    made = llm.make_requests(
        {"prompt_token_ids": mixed.prompt}, mixed.params, mixed.tools, mixed.detector, async_calls=mixed.async_calls
    )
    follow_up = FollowUp() if mixed.continued else None
    return [replace(request, tenant=mixed.tenant, priority=mixed.priority, follow_up=follow_up) for request in made]


def _serve(llm: LLM, mix: list[MixedRequest], groups: list[list[Request]]) -> dict[str, RequestOutput]:
    """All of them at once: some in streams of their own, some of which are left before their end."""
    thread, outputs = llm.engine.thread, dict[str, RequestOutput]()
    own = [mixed.streamed or mixed.read is not None for mixed in mix]
    together = Stream(
        thread, [request for group, apart in zip(groups, own, strict=True) if not apart for request in group]
    )
    streams = [
        (mixed, group, Stream(thread, group)) for mixed, group, apart in zip(mix, groups, own, strict=True) if apart
    ]
    streams.sort(key=lambda stream: stream[0].read is None)  # who leaves, leaves early
    for mixed, group, stream in streams:
        tokens = {request.id: list[int]() for request in group}
        for number, event in enumerate(stream):
            if number == mixed.read:
                stream.abort()
            if isinstance(event, Token):
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Resumed | Interrupted):
                tokens[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                assert event.output.outputs[0].token_ids == tokens[event.request_id]
        outputs |= stream.outputs
    assert sum(1 for event in together if isinstance(event, Finished)) == sum(map(len, groups)) - len(outputs)
    return {**outputs, **together.outputs}


def _alone(roomy: LLM, request: Request) -> RequestOutput:
    """What a request of one output does alone."""
    name = f"{request.id} alone {time.monotonic_ns()}"
    request = replace(request, id=name, leader=None, follow_up=None, follows=None, tenant="", priority=0)
    [output] = serve(roomy.engine.thread, [request])
    return output


def _with_results(request: Request, ours: CompletionOutput) -> Request:
    """The request with the results of its asynchronous calls where they came, as results of calls that pause."""
    script, returned = dict[int, list[int]](), 0
    for interrupt in ours.interrupts:
        start, end = interrupt.span
        script.setdefault(start - returned, []).extend(ours.token_ids[start:end])
        returned += end - start
    calls = {place: [Call("scripted", " ".join(map(str, tokens)))] for place, tokens in script.items()}
    [forbidden] = TOKENIZER.encode("[INTR]")
    params = replace(request.params, bad_words_token_ids=[[forbidden]])
    tools = {"scripted": replace(TOOL, max_result_tokens=100)}
    return replace(request, markup=None, params=params, tools=tools, detector=ScriptedDetector(calls))


def _next_turn(llm: LLM, request: Request, output: RequestOutput) -> Request:
    """A request that goes on from an output."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:80]
    params = SamplingParams(temperature=0.7, seed=len(tokens), max_tokens=6, ignore_eos=True)
    [made] = llm.make_requests({"prompt_token_ids": [*tokens, 7, 8]}, params, (), None)
    return replace(made, follows=request.id, tenant=request.tenant)


def _check_reports(ours: RequestOutput, theirs: RequestOutput, within: float) -> None:
    """Log probabilities of the tokens themselves."""
    for mine, other in (
        (ours.prompt_logprobs, theirs.prompt_logprobs),
        (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
    ):
        assert (mine is None) == (other is None)
        values = [
            [next(iter(named.values())).logprob for named in reports or () if named is not None]
            for reports in (mine, other)
        ]
        assert values[0] == pytest.approx(values[1], abs=within)


def _margin(roomy: LLM, request: Request, ours: CompletionOutput, place: int, tokens: tuple[int, int]) -> float:
    """By how much one token is better than another at a place of an output, its random numbers included.

    Not exact with a repetition penalty, which depends on the logits themselves; a filter's bound may part outputs too.
    """
    prefix, params = [*request.prompt_token_ids, *ours.token_ids[:place]], request.params
    logits = np.full(128, -100.0)
    for token_id in tokens:
        forced = SamplingParams(
            temperature=0.0, max_tokens=1, forced_output_ids=[token_id], logprobs=0, ignore_eos=True
        )
        [output] = roomy.generate({"prompt_token_ids": prefix}, forced)
        [named] = output.outputs[0].logprobs or [None]
        assert named is not None
        logits[token_id] = named[token_id].logprob
    returned = {i for pause in ours.interceptions for i in range(*pause.span)}
    returned |= {i for interrupt in ours.interrupts for i in range(*interrupt.span)}
    output = [token for i, token in enumerate(ours.token_ids[:place]) if i not in returned]
    given = [*request.prompt_token_ids, *(token for i, token in enumerate(ours.token_ids[:place]) if i in returned)]
    values = shaped(
        logits, replace(params, min_tokens=0, bad_words_token_ids=(), allowed_token_ids=None), given, output
    )
    values = values[list(tokens)]
    if params.temperature:
        assert params.seed is not None
        words = divmod(random_key(params.seed, request.prompt_token_ids, request.index), 1 << 32)
        key = jax.random.fold_in(
            jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32"), len(prefix)
        )
        values = values / params.temperature + np.asarray(jax.random.gumbel(key, (128,)))[list(tokens)]
    return float(values[0] - values[1])


def _count_output(counts: Counter[str], mixed: MixedRequest, request: Request, output: RequestOutput) -> None:
    done, params = output.outputs[0], request.params
    counts["outputs of several"] += request.index > 0
    counts["drawn tokens"] += done.num_generated if params.temperature else 0
    constrained = done.num_generated if params.structured_outputs is not None else 0
    counts["constrained tokens"] += constrained
    counts["constrained tokens with drafts"] += constrained if mixed.kind == "repetitive" else 0
    counts["asynchronous results"] += len(done.interrupts)
    if mixed.kind in ("calls by stop strings", "calls by tokens"):
        counts[mixed.kind] += len(done.interceptions)
    counts["streams"] += mixed.streamed
    counts["reports"] += len(done.logprobs or ())
    counts["scores"] += len(output.prompt_logprobs or ())
    counts["stop strings"] += isinstance(done.stop_reason, str)


@pytest.fixture
def make_mixes() -> Iterator[Callable[..., Mixes]]:
    with ExitStack() as ends:
        yield lambda *names: Mixes(names, ends)


@pytest.mark.timeout(600)  # a first run compiles for minutes
def test_every_output_of_a_mix_is_that_of_its_request_alone(make_mixes: Callable[..., Mixes]) -> None:
    mixes = make_mixes("two devices")
    mixes.run(SEED, len(KINDS))
    print(mixes)
    assert mixes.ties <= 1
    assert all(mixes.counts[name] for name in COUNTED), f"{mixes}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_mixes_for_as_long_as_wanted(make_mixes: Callable[..., Mixes]) -> None:
    mixes = make_mixes(*ENGINES)
    seed, seconds = int(os.environ.get("MIXES_SEED", "100")), float(os.environ.get("MIXES_SECONDS", "60"))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        mixes.run(seed, Random(seed).randrange(1, 60))
        seed += 1
    print(f"mixes before {seed}: {mixes}")
    assert seconds < 60 or all(mixes.counts[name] for name in (*COUNTED, "bytes from disk"))
    assert mixes.ties <= 2 + mixes.outputs / 1000
