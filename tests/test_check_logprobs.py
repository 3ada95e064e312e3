"""`check_logprobs` says whether and where a forward pass differs from the engine, and `batch_invariant` that nothing does."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.calls import Call
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.models.adapted import without_adapters
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.models.joined_weights import separate
from jinfercept.models.model import Model
from jinfercept.models.protocol import Params
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.start import set_up
from jinfercept.testing import check_logprobs, forward_logits, forward_logprobs
from tests.support.fake_engine import POLICIES
from tests.support.tiny_model import GOLDEN, TOOL, tiny_llm, tiny_setup

LENGTH = 256
SIZES = {"batch_invariant": True, "max_num_batched_tokens": 128, "max_num_seqs": 12, "kv_tokens": 1024}
WIDE = ModelConfig(
    family="llama",
    vocab_size=300,
    hidden_size=192,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    ffn_size=256,
    norm_eps=1e-5,
    max_position=LENGTH,
    rope=RopeConfig(10000.0, 64),
    tie_embeddings=False,
    eos_token_ids=(),
    activation="silu",
)


@pytest.fixture(scope="module")
def wide() -> Iterator[LLM]:
    """Random weights with heads of 64, as most published models have them."""
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "max_model_len": LENGTH, **SIZES}
    with LLM(set_up(WIDE, profile="paper-gptj-6b-a100", lazy=True, check_pages=True, **options)) as llm:
        yield llm


def weights(llm: LLM) -> Params:
    return llm.params


def forward_of(llm: LLM) -> Callable[[Any], Any]:
    assert isinstance(llm.model, Model)
    compute = jax.jit(forward_logprobs, static_argnums=0)
    return lambda tokens: compute(llm.model, weights(llm), np.pad(tokens, (0, LENGTH - len(tokens))))[: len(tokens) - 1]


def ordinary(llm: LLM, *, late: int = 1 << 20) -> Callable[[Any], Any]:
    """A forward pass as any trainer writes one: einsum, a mask, softmax, `log_softmax` left to the caller.

    Args:
        late: from this position on, positions are off by one.
    """

    def attend(q: Any, k: Any, v: Any, kv: None, scoring: Any = None) -> tuple[Any, None]:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((len(q), len(q)), bool)), scores, -1e30)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v), kv

    @jax.jit
    def logits(params: Params, tokens: Any) -> Any:
        positions = jnp.arange(len(tokens))
        positions += positions >= late
        x = llm.model.embed(params.embed, tokens, positions)
        for layer in params.layers:
            x, _ = llm.model.layer(layer, x, positions, None, attend)
        return llm.model.head(params.head, x)

    def forward(tokens: Any) -> Any:
        return logits(weights(llm), np.pad(tokens, (0, LENGTH - len(tokens))))[: len(tokens)]

    return forward


def test_an_ordinary_forward_pass_has_the_bits_of_the_engine(wide: LLM) -> None:
    report = check_logprobs(wide, ordinary(wide))
    assert report.total.equal == 1.0, str(report)
    assert report.first is None
    assert all(part.num_tokens > 50 for part in report.parts.values())
    assert "100.0%" in str(report)
    wide.restart(policy="swap", max_chunk_tokens=5, pipeline_depth=0)
    assert check_logprobs(wide, ordinary(wide), max_tokens=7).total.equal == 1.0


@pytest.mark.slow
def test_the_forward_pass_that_is_shipped_has_them_with_small_heads_too() -> None:
    with tiny_llm(max_model_len=120, **SIZES) as llm:
        assert llm.shape.buckets == (128,)  # 64 rows of 32 columns are summed in another order than more rows
        report = check_logprobs(llm, forward_of(llm))
        assert report.total.equal == 1.0, str(report)
        llm.restart(policy="swap", max_chunk_tokens=5, pipeline_depth=0)
        report = check_logprobs(llm, forward_of(llm), max_tokens=7)
        assert report.total.equal == 1.0, str(report)


@pytest.mark.slow
def test_without_the_option_bits_differ_and_the_report_shows_by_how_much() -> None:
    with tiny_llm(max_model_len=120) as llm:
        report = check_logprobs(llm, forward_of(llm), max_tokens=5, tolerance=1e-3)
        assert report.total.equal < 0.9
        assert 0 < report.total.largest < 1e-4
        assert 1 < report.total.ratio_max < 1.0001
        assert report.first is None


def test_the_report_says_where_differences_begin(wide: LLM) -> None:
    prompts = [{"prompt_token_ids": np.random.default_rng(1).integers(0, 300, 90).tolist()}]
    exact = forward_of(wide)

    def begins(forward: Callable[[Any], Any]) -> str:
        return check_logprobs(wide, forward, prompts, max_tokens=6).begins

    assert begins(lambda tokens: exact(tokens) + 1.0).startswith("nearly all tokens")
    assert begins(ordinary(wide, late=60)).startswith("from position 61 on nearly all")
    paused = 90 + 6 + 5
    assert begins(
        lambda tokens: np.where((np.arange(1, len(tokens)) >= 93) & (len(tokens) == paused), 0.0, exact(tokens))
    ) == ("only behind a pause, from the tool's tokens on")
    token = prompts[0]["prompt_token_ids"][40]
    assert begins(lambda tokens: np.where(tokens[1:] == token, 0.0, exact(tokens))).startswith(f"the tokens [{token}]")


def test_a_forward_pass_of_another_shape_is_refused(wide: LLM) -> None:
    with pytest.raises(ConfigError, match="forward returned a wrong shape"):
        check_logprobs(wide, lambda tokens: np.zeros((2, len(tokens))), max_tokens=4)


def test_the_weights_of_an_engine_with_adapters_are_computed_and_given_back_joined_or_apart() -> None:
    with tiny_llm(max_loras=1, max_lora_rank=8) as llm:
        assert isinstance(llm.model, Model)
        served, tokens = jax.tree.map(jnp.copy, weights(llm)), jnp.arange(9)
        plain = without_adapters(served)
        expected = forward_logprobs(llm.model, plain, tokens)
        for params in (served, separate(plain), jax.tree.map(np.asarray, separate(plain))):
            np.testing.assert_array_equal(forward_logprobs(llm.model, params, tokens), expected)
            llm.update_weights(params)
            np.testing.assert_array_equal(forward_logprobs(llm.model, weights(llm), tokens), expected)


@pytest.mark.slow
def test_the_forward_pass_has_gradients(wide: LLM) -> None:
    model = wide.model
    assert isinstance(model, Model)
    tokens = jnp.arange(9)
    gradient = jax.jit(jax.grad(lambda params: forward_logprobs(model, params, tokens).sum()))(weights(wide))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    assert forward_logits(model, weights(wide), tokens).shape == (9, 300)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"dtype": "bfloat16"}, "dtype=bfloat16"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8"),
        ({"attention": "reference"}, "attention=reference"),
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens=100"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
    ],
)
def test_what_has_bits_of_its_own_is_refused(options: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_invariant cannot be combined with this option; got {got}"):
        tiny_setup(**{**SIZES, **options})


def test_experts_and_recurrent_layers_are_refused() -> None:
    for name in ("mixtral", "qwen3_next", "gpt_oss"):
        with pytest.raises(ConfigError, match="batch_invariant cannot be combined with this option"):
            set_up(GOLDEN / name, dtype="float32", profile="paper-gptj-6b-a100", **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "qwen3", "mistral_windowed", "olmo2"])
def test_the_matrix_of_policies_chunks_depths_pauses_and_batches(name: str, layers: int) -> None:
    rng = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": rng.integers(0, 100, length).tolist()} for length in (1, 2, 9, 31, 64, 70)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    detectors = [ScriptedDetector({4 + number: [Call("scripted", "3 1 4")]}) for number in range(len(prompts))]

    def bits(llm: LLM, batch: int) -> list[Any]:
        outputs = []
        for first in range(0, len(prompts), batch):
            group = slice(first, first + batch)
            outputs += llm.generate(prompts[group], params, tools=[TOOL], detector=detectors[group])
        return [(output.outputs[0].token_ids, output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    small = {**SIZES, "kv_tokens": 112, "max_model_len": 100, "swap_space": 0.001}
    with tiny_llm(name, layers_per_step=layers, **small) as llm:
        expected = None
        for policy in POLICIES:
            for depth in (0, 1):
                for chunk, batch in ((1, 6), (3, 2), (16, 1), (None, 6)):
                    llm.restart(policy=policy, pipeline_depth=depth, max_chunk_tokens=chunk)
                    got = bits(llm, batch)
                    expected = expected or got
                    assert got == expected, (policy, depth, chunk, batch)
        assert check_logprobs(llm, forward_of(llm), max_tokens=9).total.equal == 1.0
