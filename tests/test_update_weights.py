"""Other weights of the same model: the old pages are gone, what does not fit is refused, and nothing is compiled."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.errors import EngineError, ModelError, RequestError
from jinfercept.llm import LLM
from jinfercept.models import load as models_load
from jinfercept.models import stored_weights
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load, random_params
from jinfercept.models.model import untied
from jinfercept.models.protocol import Params
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.gate import closed_gate
from tests.support.scripted_model import Make
from tests.support.tiny_model import GOLDEN, tiny_llm, tiny_setup

SIZES: Any = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "profile": "paper-gptj-6b-a100"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20))}


@pytest.mark.parametrize("name", ["llama_tied", pytest.param("llama_gqa", marks=pytest.mark.slow)])
def test_new_weights_write_what_they_would_write_alone(name: str) -> None:
    setup = tiny_setup(name)
    with LLM(setup) as llm:
        old = jax.tree.map(np.array, separate(setup.runner.params))
        before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        other = separate(random_params(llm.model.config, "float32", 7))  # pyright: ignore[reportArgumentType]
        other = untied(llm.model.config, other)  # pyright: ignore[reportArgumentType]
        llm.update_weights(jax.tree.map(np.array, other))  # compiles what writes weights
        compilations = CompileCounter()
        llm.update_weights(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), other))
        [after] = llm.generate(PROMPT, GREEDY)
        llm.update_weights(old)
        [again] = llm.generate(PROMPT, GREEDY)
        compilations.close()
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids != before
    assert again.outputs[0].token_ids == before
    assert compilations.count == 0


def test_an_llm_takes_numpys_arrays_and_refuses_weights_that_do_not_fit() -> None:
    loaded = load(GOLDEN / "llama_tied", dtype="float32")
    numpys = jax.tree.map(np.asarray, untied(loaded.model.config, separate(loaded.params)))
    embed, layers, head = numpys
    [name, *_] = layers[0]
    with tiny_llm("llama_tied") as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    with LLM(loaded.model, params=numpys, **SIZES) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
    wrongs: list[tuple[Any, str]] = [
        ({}, "params must be Params; got dict"),
        ((embed, layers, head), "params must be Params; got tuple"),
        (Params(embed, layers[:-1], head), "another number of layers than the model"),
        (
            Params({"tokens": embed["embedding"]}, layers, head),
            "weight .* the model has no weight of this name|is missing",
        ),
        (Params(jax.tree.map(lambda leaf: leaf[:-1], embed), layers, head), "embedding.* has another shape"),
        (Params(embed, ({k: v for k, v in layers[0].items() if k != name}, *layers[1:]), head), "is missing"),
        (Params(embed, layers, cast(Any, [head])), "the parts of Params must be"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(ModelError, match=words):
            LLM(loaded.model, params=wrong, **SIZES)


def test_the_layers_of_a_model_of_ones_own_are_alike(make_scripted: Make) -> None:
    scripted = make_scripted(None)
    llm = scripted.llm
    embed, layers, head = scripted.runner.params
    for wrong, words in (
        ((*layers, *layers), "another number of layers"),
        (({"next": "a table"},), "is not an array; got str"),
    ):
        with pytest.raises(ModelError, match=words):
            LLM(llm.model, params=Params(embed, wrong, head), tokenizer=llm.tokenizer)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay() -> None:
    setup = tiny_setup()
    with LLM(setup) as llm:
        good = separate(setup.runner.params)
        before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        shorter = good._replace(layers=good.layers[:-1])
        wide = good._replace(head=jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape)), good.head))
        odd: tuple[Any, ...] = (np.array("text"), np.ma.masked_array([1.0]), np.array([1j]), np.array([None]), 1.0)
        cases: list[tuple[Any, str]] = [
            (shorter, "is missing"),
            (wide, "has another shape"),
            ({}, "no weights were given"),
            (good.layers, "params must be Params, or arrays by name; got tuple"),
        ]
        odd += tuple(np.ones(8, kind) for kind in (np.int32, jnp.float8_e4m3fn, jnp.int4))
        cases += [
            (good._replace(head={**good.head, "kernel": leaf}), r"head\.kernel (is no|has an unsupported)")
            for leaf in odd
        ]
        for wrong, words in cases:
            with pytest.raises(ModelError, match=words):
                llm.update_weights(wrong)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before
        with closed_gate(llm):
            stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
            with pytest.raises(RequestError, match="only an idle LLM can take new weights"):
                llm.update_weights(good)
        stream.close()


@pytest.mark.parametrize(
    "name",
    ["llama_tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "gpt_oss_mxfp4", "gptj"))],
)
def test_a_checkpoint_is_written_over_the_served_weights_block_by_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_load, "PIECE_BYTES", (4096, 4096))
    setup = tiny_setup(name, quantization="none")
    with LLM(setup) as llm:
        served = jax.tree.map(np.array, setup.runner.params)
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        llm.update_weights(jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), separate(served)))
        read, pieces, failing = stored_weights.read_floats, list[int](), [12]

        def fail_in_the_middle(*arguments: Any) -> Any:
            pieces.append(len(pieces))
            if len(pieces) in failing:
                raise OSError("the disk is gone")
            return read(*arguments)

        monkeypatch.setattr(stored_weights, "read_floats", fail_in_the_middle)
        with pytest.raises(OSError, match="the disk is gone"):
            llm.update_weights(GOLDEN / name)
        assert not llm.is_sleeping
        num_before = len(pieces)
        llm.update_weights(GOLDEN / name)
        failing.append(len(pieces) + (len(pieces) - num_before) // 2 + 12)
        with pytest.raises(EngineError, match="the disk is gone; the weights before are overwritten in part"):
            llm.update_weights(GOLDEN / name)
        assert llm.is_sleeping
        llm.wake(separate(served))
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        llm.update_weights(GOLDEN / name)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        jax.tree.map(np.testing.assert_array_equal, setup.runner.params, served)
