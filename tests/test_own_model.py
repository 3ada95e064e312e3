"""A user's own Flax model through the protocol: the example runs, and its tokens are those of the model without a cache."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jinfercept.errors import ModelError
from jinfercept.llm import LLM
from jinfercept.models.protocol import ServedModel
from tests.support.dense_model import dense_attend

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_model.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
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
        x = model.embed(params.embed, tokens)
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
