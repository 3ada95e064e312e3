"""A user's own Flax model through the protocol: the example runs, and its tokens are those of the model without a cache."""

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import ModelError
from jinfercept.llm import LLM
from jinfercept.models.protocol import MixedModel, Params, ServedModel, WindowedModel, windows_of
from tests.support.dense_model import dense_attend
from tests.support.tiny_model import GOLDEN

EXAMPLES = Path(__file__).parent.parent / "examples"
GPT2 = runpy.run_path(str(EXAMPLES / "gpt2.py"))


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLES / "own_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_writes_what_the_model_says_without_a_cache(example, capsys):
    model, params = example.make()
    assert isinstance(model, ServedModel)

    @jax.jit
    def logits(tokens):
        x = model.embed(params.embed, tokens, jnp.arange(len(tokens)))
        for weights in params.layers:
            x, _ = model.layer(weights, x, jnp.arange(len(tokens)), None, dense_attend)
        return model.head(params.head, x)

    written = example.main()
    assert len(capsys.readouterr().out.splitlines()) == 2
    for prompt, tokens in zip([[1, 2, 3], list(range(40))], written, strict=True):
        stream = jnp.zeros(64, jnp.int32).at[: len(prompt) + 16].set(jnp.array(prompt + tokens))
        rows = logits(stream)[len(prompt) - 1 : len(prompt) + 15]
        assert rows.argmax(axis=-1).tolist() == tokens


def test_a_model_without_weights_is_refused(example):
    with pytest.raises(ModelError, match="a Model needs its weights"):
        LLM(example.make()[0])


def gpt2_logits(model: Any, params: Params, tokens: jax.Array) -> jax.Array:
    """Of the whole sequence, without a cache."""
    positions, kinds = jnp.arange(len(tokens)), model.layer_kinds or ("dense",) * model.config.num_layers
    x = model.embed(params.embed, tokens, positions)
    for kind, weights in zip(kinds, params.layers, strict=True):
        x, _ = model.layer(weights, x, positions, None, dense_attend, kind=kind)
    return model.head(params.head, x)


def test_the_example_of_gpt2_has_the_logits_of_transformers() -> None:
    sizes, params = GPT2["checkpoint"](GOLDEN / "gpt2")
    golden = np.load(GOLDEN / "gpt2.npz")
    ours = gpt2_logits(GPT2["GPT2"](sizes), jax.tree.map(jnp.asarray, params), jnp.asarray(golden["tokens_0"]))
    np.testing.assert_allclose(ours, golden["logits_0"], atol=1e-4)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_learned_positions_and_layers_of_two_kinds_are_served(window: int | None) -> None:
    model: Any = GPT2["GPT2"](GPT2["Sizes"](window=window))
    assert all(isinstance(model, protocol) for protocol in (ServedModel, MixedModel, WindowedModel))
    assert windows_of(model) == (() if window is None else (None, window, None, window)[: model.config.num_layers])
    params = jax.tree.map(jnp.asarray, GPT2["random_weights"](model.config))
    for prompt, tokens in zip([[1, 2, 3], list(range(40))], GPT2["main"](window=window), strict=True):
        rows = gpt2_logits(model, params, jnp.asarray(prompt + tokens))[len(prompt) - 1 : -1]
        assert rows.argmax(axis=-1).tolist() == tokens
