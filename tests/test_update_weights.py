"""Other weights of the same model: the old pages are gone, what does not fit is refused, and nothing is compiled."""

import jax
import numpy as np
import pytest
from tiny import tiny_llm

from jinfercept.errors import ModelError, RequestError
from jinfercept.metrics import CompileCounter
from jinfercept.models.dummy import random_params
from jinfercept.models.model import untied
from jinfercept.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20))}


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_new_weights_write_what_they_would_write_alone(name: str) -> None:
    with tiny_llm(name) as llm:
        old = llm.runner.params
        before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        other = untied(llm.model.config, random_params(llm.model.config, "float32", 7))  # pyright: ignore[reportArgumentType]
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


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay() -> None:
    with tiny_llm() as llm:
        good = llm.runner.params
        before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        shorter = good._replace(layers=good.layers[:-1])
        wide = good._replace(head=jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape)), good.head))
        for wrong, words in ((shorter, "is missing"), (wide, "has another shape"), ({}, "new weights are Params")):
            with pytest.raises(ModelError, match=words):
                llm.update_weights(wrong)  # pyright: ignore[reportArgumentType]
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before
        stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        with pytest.raises(RequestError, match="only an idle LLM can take new weights"):
            llm.update_weights(good)
        stream.close()
