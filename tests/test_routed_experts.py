"""The experts of tokens come back with them: those that the model chooses without a cache, whatever becomes of contexts."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import ConfigError, RequestError
from jinfercept.models.load import load
from jinfercept.outputs import CompletionOutput, RequestOutput
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from jinfercept.pallas.layouts.states import StateRows
from jinfercept.sampling_params import SamplingParams
from tests.support.dense_model import dense_attend
from tests.support.tiny_model import LENGTH, Workload, tiny_llm

GOLDEN = Path(__file__).parent / "golden"
PROMPT = {"prompt_token_ids": [*range(3, 14)]}
SIZES = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_tokens": 256}
ROUTED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, return_routed_experts=True)


class Noting:
    """Dense attention that collects the experts of every layer."""

    def __init__(self) -> None:
        self.experts: list[jax.Array] = []

    def __call__(self, q: Any, k: Any, v: Any, kv: Any, /, scoring: Scoring = PLAIN) -> Any:
        return dense_attend(q, k, v, kv, scoring)

    def note_experts(self, experts: jax.Array) -> None:
        self.experts.append(experts)


class NotingRows(StateRows):
    """The same of a recurrent layer's only row."""

    experts: list[jax.Array]

    def note_experts(self, experts: jax.Array) -> None:
        self.experts.append(experts)


@cache
def model_without_cache(name: str) -> Callable[[jax.Array], jax.Array]:
    """The experts of `LENGTH` tokens."""
    loaded = load(GOLDEN / name, dtype="float32")
    model, params = loaded.model, loaded.params

    @jax.jit
    def experts(tokens: jax.Array) -> jax.Array:
        noting, positions = Noting(), jnp.arange(len(tokens))
        x = model.embed(params.embed, tokens, positions)
        for index, layer in enumerate(params.layers):
            kind = model.config.kind(index)
            states = tuple(jnp.zeros((2, *array.shape), array.dtype or x.dtype) for array in model.layer_states(kind))
            rows = NotingRows(*map(jnp.array, ([1], [1], [0], [0, len(x)], [len(x)], 0)))
            rows.experts = noting.experts
            x, _ = model.layer(layer, x, positions, states or None, cast(Any, rows) if states else noting, kind=kind)
        return jnp.stack(noting.experts, axis=1)

    return experts


def expected(name: str, tokens: list[int]) -> np.ndarray:
    padded = jnp.zeros(LENGTH, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens))
    return np.asarray(model_without_cache(name)(padded))[: len(tokens)]


def check(name: str, output: RequestOutput, completion: CompletionOutput) -> None:
    tokens = [*output.prompt_token_ids, *completion.token_ids][:-1]
    assert completion.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(completion.routed_experts, expected(name, tokens))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("qwen3_moe_mixed", "copy_ahead"),
        *(
            pytest.param(name, policy, marks=pytest.mark.slow)
            for name in ("mixtral", "gpt_oss_mxfp4", "qwen3_moe", "qwen3_next")
            for policy in ("discard", "swap", "min_waste")
        ),
    ],
)
def test_every_token_has_the_experts_of_the_model_without_a_cache(name: str, policy: str) -> None:
    workload = Workload(6, seed=1)
    workload.params = [replace(params, return_routed_experts=True) for params in workload.params]
    with tiny_llm(name, policy=policy, **SIZES, enable_return_routed_experts=True) as llm:
        outputs = workload.run(llm)
    assert any(output.interceptions for output in outputs)
    for output in outputs:
        check(name, output, output.outputs[0])


def test_cached_prefixes_and_forks_leave_no_gap() -> None:
    name, drawn = "qwen3_moe_mixed", replace(ROUTED, temperature=1.0, max_tokens=5, n=3, seed=7)
    with tiny_llm(name, **SIZES, enable_return_routed_experts=True) as llm:
        plain = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert llm.generate(PROMPT, plain)[0].outputs[0].routed_experts is None
        for params in (ROUTED, ROUTED, drawn):
            [output] = llm.generate(PROMPT, params)
            for completion in output.outputs:
                check(name, output, completion)
        with llm.rollout_stream(PROMPT, drawn) as stream:
            stream.abort()
            resumed = llm.rollout(stream.result())
        for sample in (*llm.rollout(PROMPT, drawn), *resumed):
            np.testing.assert_array_equal(sample.routed_experts, expected(name, sample.token_ids[:-1].tolist()))


def test_an_engine_that_was_not_told_to_return_experts_refuses_to() -> None:
    with (
        tiny_llm("mixtral") as llm,
        pytest.raises(
            RequestError,
            match="the engine does not record which experts computed a token; got return_routed_experts=True",
        ),
    ):
        llm.generate(PROMPT, ROUTED)


def test_a_model_without_experts_cannot_return_any() -> None:
    with pytest.raises(ConfigError, match="no experts whose choice could be returned; got llama"):
        tiny_llm("llama_gqa", enable_return_routed_experts=True)
