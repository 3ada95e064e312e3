"""A user's own Flax model through the protocol: the example runs, and its tokens are those of the model without a cache."""

import importlib.util
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import ModelError
from jinfercept.llm import LLM
from jinfercept.models.protocol import MixedModel, Params, ServedModel, WindowedModel, windows_of
from jinfercept.pallas.layouts.scoring import Scoring
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.own_model import check_functions
from tests.support.dense_model import dense_attend
from tests.support.scripted_model import Numbers, ScriptedModel, byte_tokenizer
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


def refusal(model: Any, params: Params) -> str:
    with pytest.raises(ModelError) as caught:
        LLM(model, params=params, max_num_seqs=2, max_num_batched_tokens=8)
    return str(caught.value)


def of_example(model: Any) -> Any:
    """The functions of the example's own class."""
    return super(type(model), model)


def with_layer(change: Any) -> dict[str, Any]:
    """A model's `layer` with what goes into it and comes out of it changed.

    Args:
        change: of the example's `layer`, its weights, x, positions, kv and attend.
    """

    def layer(self: Any, params: Any, x: Any, positions: Any, kv: Any, attend: Any) -> Any:
        return change(of_example(self).layer, params, x, positions, kv, attend)

    return {"layer": layer}


def with_attend(change: Any) -> dict[str, Any]:
    """A model whose `attend` is called through a function of the queries, keys, values, kv and the real one."""
    return with_layer(lambda layer, w, x, at, kv, attend: layer(w, x, at, kv, lambda *qkv: change(attend, *qkv)))


def with_embed(change: Any) -> dict[str, Any]:
    def embed(self: Any, params: Any, tokens: Any, positions: Any) -> Any:
        return change(of_example(self).embed(params, tokens, positions), positions)

    return {"embed": embed}


def with_head(change: Any) -> dict[str, Any]:
    return {"head": lambda self, params, x: change(of_example(self).head(params, x))}


def swapped(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return pair[1], pair[0]


def twice(attend: Any, q: Any, k: Any, v: Any, kv: Any) -> Any:
    return attend(q, k, v, attend(q, k, v, kv)[1])


def by_place(x: jax.Array) -> jax.Array:
    return x * jnp.cos(jnp.arange(len(x)))[:, None]


def noisy(x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.key(0), x.shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_head(lambda y: y[:, :-1]), r"head\(\) returns \[5, 100\] of float32; got \[5, 99\] of float32"),
        (with_head(lambda y: y - y.mean(0)), r"head\(\) mixes rows"),
        (with_embed(lambda y, at: y.T), r"embed\(\) returns \[5, 32\] of floating-point numbers; got \[32, 5\]"),
        (
            with_embed(lambda y, at: y + jnp.ones((9, 1))[at]),
            r"reads a table behind its end.*index 255 is out of bounds for axis 0 with size 9",
        ),
        (
            with_embed(lambda y, at: y + jax.jit(jax.vmap(lambda i: jnp.ones((9, 1))[i]))(at)),
            r"reads a table behind its end.*index 255 is out of bounds for axis 0 with size 9",
        ),
        (with_embed(lambda y, at: y * jnp.nan), r"embed\(\) returns NaN for finite numbers"),
        (with_embed(lambda y, at: y + jnp.arange(len(y))[:, None]), r"embed\(\) mixes rows.*, or with its place"),
        (with_layer(lambda layer, w, x, *others: layer(w, by_place(x), *others)), r"layer\(\) mixes rows"),
        (with_layer(lambda layer, w, x, *others: layer(w, noisy(x), *others)), r"layer\(\) mixes rows"),
        (with_layer(lambda layer, w, x, *others: layer(w, x * jnp.nan, *others)), r"layer\(\) returns NaN for finite"),
        (
            with_attend(lambda attend, *qkv: attend(*qkv, Scoring(window=0))),
            r"window and soft_cap of attend in layer\(\) are above 0 or None; got \(0, None\)",
        ),
        (with_embed(lambda y, at: y if y.sum() > 0 else -y), r"embed\(\) of the model fails; got TracerBool"),
        (with_layer(lambda layer, w, x, at, kv, attend: (x, kv)), r"calls attend once, .*; got no call"),
        (with_attend(twice), r"calls attend once, .*; got a second call"),
        (with_attend(lambda attend, q, k, v, kv: (attend(q, k, v, kv)[0], kv)), r"returns the kv that attend returned"),
        (
            with_attend(lambda attend, q, k, v, kv: attend(q, k.swapaxes(0, 1), v, kv)),
            r"k of attend in layer\(\) is \[5, 2, 8\]",
        ),
        (
            with_attend(lambda attend, q, k, v, kv: attend(q[:, :2], k, v, kv)),
            r"q of attend in .*\[5, 4, 8\] .*\[5, 2, 8\]",
        ),
        (
            with_layer(lambda layer, *others: swapped(layer(*others))),
            r"layer\(\) returns \[5, 32\] of float32; got \[1\]",
        ),
        (with_layer(lambda layer, *others: layer(*others)[0]), r"layer\(\) returns x and kv; got \[5, 32\] of float32"),
        (with_layer(lambda layer, w, x, *others: layer({}, x, *others)), r"layer\(\) of the model fails; got "),
        (
            with_layer(lambda layer, *others: (layer(*others)[0].astype(jnp.bfloat16), layer(*others)[1])),
            r"layer\(\) (returns \[5, 32\] of float32|calls attend)",
        ),
    ],
)
def test_a_function_of_a_model_that_is_wrong_is_refused_by_name(example, changes: dict[str, Any], message: str) -> None:
    model, params = example.make()
    model.__class__ = type("Changed", (type(model),), changes)
    assert re.search(message, refusal(model, params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": None}, "num_layers is a whole number above 0 and below"),
        ({"vocab_size": 99.0}, "vocab_size is a whole number above 0 and below"),
        ({"head_dim": 0}, "head_dim is a whole number above 0 and below"),
        ({"num_kv_heads": 3}, "query heads must divide evenly among KV heads; got 4 and 3"),
        ({"eos_token_ids": 2}, "eos_token_ids of the config are a tuple of token ids; got 2"),
        (
            {"vocab_size": 101},
            "index 100 is out of bounds for axis 0 with size 100",
        ),
        ({"eos_token_ids": (100,)}, "eos_token_ids of the config are tokens below vocab_size, 100; got (100,)"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids of the config are tokens below vocab_size, 100; got (-1,)"),
        ({"vocab_size": 99}, "head() returns [5, 99] of float32; got [5, 100] of float32"),
        ({"hidden_size": 33}, "embed() returns [5, 33] of floating-point numbers; got [5, 32] of float32"),
    ],
)
def test_sizes_of_a_model_that_are_wrong_are_refused_by_name(example, changes: dict[str, Any], message: str) -> None:
    model, params = example.make()
    model.config = replace(model.config, **changes)
    assert message in refusal(model, params)


def test_a_config_without_layers_and_weights_of_whole_numbers_are_refused(example) -> None:
    model, params = example.make()
    whole = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), params)
    assert "first weight is of floating-point numbers: keys and values are kept in its dtype; got int32" in (
        refusal(model, whole)
    )
    model.config = SimpleNamespace(
        **{name: value for name, value in vars(model.config).items() if name != "num_layers"}
    )
    assert "the config of a model lacks attributes; got no num_layers" in refusal(model, params)


def test_what_lacks_a_part_of_a_model_is_refused_by_that_part(example) -> None:
    model, params = example.make()
    assert "fix: give an instance, OwnModel(…), in place of the class" in refusal(type(model), params)
    parts = {name: getattr(model, name) for name in ("config", "embed", "layer", "head")}
    for name in parts:
        rest = SimpleNamespace(**{other: part for other, part in parts.items() if other != name})
        assert f"fix: give it {name}, see docs/own_model.md" in refusal(rest, params)


def test_tables_that_are_read_within_their_bounds_by_other_means_are_served(example) -> None:
    def embed(self: Any, params: Any, tokens: Any, positions: Any) -> Any:
        first, more = params["embedding"][:40], params["embedding"][40:]
        is_first, rest = tokens < 40, jax.checkpoint(lambda at: more[at])(jnp.maximum(tokens - 40, 0))
        x = jnp.where(is_first[:, None], first[jnp.where(is_first, tokens, 0)], rest)
        return x + jnp.ones((9, 1))[jnp.minimum(positions, 8)]

    model, params = example.make()
    model.__class__ = type("Changed", (type(model),), {"embed": embed})
    check_functions(model, jax.tree.map(jnp.asarray, params))


@pytest.mark.parametrize("scoring", [Scoring(window=9), Scoring()])
def test_a_layer_that_sees_more_than_its_window_is_refused(example, scoring: Scoring) -> None:
    def layer(self: Any, w: Any, x: Any, at: Any, kv: Any, attend: Any, *, kind: str) -> Any:
        return of_example(self).layer(w, x, at, kv, lambda *qkv: attend(*qkv, scoring))

    model, params = example.make()
    kinds = {"layer_kinds": ("near", "near"), "layer_window": lambda self, kind: 8}
    model.__class__ = type("Changed", (type(model),), {**kinds, "layer": layer})
    got = f"at most layer_window(), 8 tokens; got {scoring.window} for layers of kind 'near'"
    assert got in refusal(model, params)


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


@pytest.mark.parametrize("is_end", [False, True])
def test_ids_without_a_token_are_not_drawn_unless_they_end_texts(is_end: bool) -> None:
    tokenizer = byte_tokenizer(None)
    padded = tokenizer.ids_below + 8
    zero, follows = jnp.zeros(1), jnp.full((16, padded), padded - 1, jnp.int32)  # the likeliest id has no token
    weights = Params({"zero": zero}, ({"next": follows},), {"zero": zero})
    model = ScriptedModel(Numbers(padded, (padded - 1,) if is_end else (), max_position=16))
    sizes: dict[str, Any] = {"kv_tokens": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with LLM(model, params=weights, tokenizer=tokenizer, profile="paper-gptj-6b-a100", lazy=True, **sizes) as llm:
        for params in (SamplingParams(temperature=0.0), SamplingParams(seed=7), SamplingParams(top_k=3)):
            [output] = llm.generate({"prompt_token_ids": [65, 66]}, replace(params, max_tokens=6))
            if is_end:
                assert output.outputs[0].token_ids == [padded - 1]
            else:
                assert len(output.outputs[0].token_ids) == 6
                assert max(output.outputs[0].token_ids) < tokenizer.ids_below
