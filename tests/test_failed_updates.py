"""Updates that fail in the middle, since an array cannot be read then: which weights serve, and what becomes of requests."""

from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfercept.errors import EngineError, RequestError
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.sampling_params import SamplingParams
from tests.support.gate import closed_gate
from tests.support.tiny_model import GOLDEN, tiny_llm

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20))}
NAME = "model.layers.{}.self_attn.q_proj.weight"
TENSORS = load_file(GOLDEN / "llama_gqa" / "model.safetensors")


class Unreadable(np.ndarray):
    """An array that fails when it is used."""

    @property
    def T(self) -> NoReturn:
        raise OSError("the file is gone")


def broken(layer: int) -> dict[str, np.ndarray]:
    """Other weights, one of which cannot be read in the end."""
    name = NAME.format(layer)
    return {key: leaf[..., ::-1].copy() for key, leaf in TENSORS.items()} | {name: TENSORS[name].view(Unreadable)}


def written(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, LONG)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        llm.update_weights(TENSORS)
        yield llm


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_requests_wait_for_whole_weights_when_some_were_overwritten(llm: LLM, mode: Any) -> None:
    expected, version = written(llm), llm.weights_version
    with closed_gate(llm, after=10) as gate:
        stream = llm.stream(PROMPT, LONG)
        for _ in range(10):
            next(stream)
        with pytest.raises(
            EngineError, match="the file is gone; the weights before are overwritten in part, and the LLM sl"
        ):
            llm.update_weights(broken(1), mode=mode)
        gate.open()
    assert llm.is_sleeping
    assert llm.weights_version == version
    with pytest.raises(RequestError, match="no weights to wake with"):
        llm.wake()
    with pytest.raises(EngineError, match="the LLM sleeps on"):
        llm.wake(broken(0))
    llm.engine.check_pages()
    llm.wake(TENSORS)
    list(stream)
    [output] = stream.outputs.values()
    assert output.outputs[0].token_ids == expected == written(llm)
    assert llm.weights_version == version + 1


def test_nothing_is_changed_where_nothing_was_overwritten(llm: LLM) -> None:
    expected, version = written(llm), llm.weights_version
    for mode in (None, "keep"):
        with pytest.raises(EngineError, match="the weights before are served on"):
            llm.update_weights(broken(0), only="model.layers.", mode=mode)
        assert not llm.is_sleeping
        assert written(llm) == expected
    llm.sleep(2)
    with pytest.raises(EngineError, match="the weights before are kept"):
        llm.update_weights(broken(1), mode="keep")
    with pytest.raises(EngineError, match="the LLM sleeps on"):
        llm.wake(broken(1))
    llm.wake()
    assert written(llm) == expected
    assert llm.weights_version == version
    llm.engine.check_pages()


def test_an_idle_engine_without_weights_waits_too(llm: LLM) -> None:
    expected = written(llm)
    with pytest.raises(EngineError, match="the LLM sleeps"):
        llm.update_weights(broken(1))
    stream = llm.stream(PROMPT, LONG)
    assert llm.update_weights(TENSORS, mode="keep") == llm.weights_version
    llm.wake()
    list(stream)
    [output] = stream.outputs.values()
    assert output.outputs[0].token_ids == expected


@pytest.mark.slow
def test_the_callers_own_weights_are_whole_after_a_first_update_that_fails() -> None:
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    with LLM(loaded.model, params=loaded.params, max_num_seqs=2, profile="paper-gptj-6b-a100", lazy=True) as llm:
        expected = written(llm)
        with pytest.raises(EngineError, match="the weights before are served on"):
            llm.update_weights(broken(1))
        assert written(llm) == expected
        llm.update_weights(TENSORS)
        assert written(llm) == expected
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(loaded.params))
