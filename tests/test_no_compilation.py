"""Nothing compiles after the start, whatever comes."""

import numpy as np
import pytest

from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.fake_engine import POLICIES
from tests.support.tiny_model import Workload, tiny_llm


@pytest.mark.parametrize("name", ["llama_gqa", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_nothing_compiles_over_two_hundred_mixed_requests(name: str) -> None:
    rng = np.random.default_rng(0)
    with tiny_llm(name, kv_tokens=160, max_model_len=100, swap_space=0.001, lazy=False) as llm:
        counter = CompileCounter()
        for index, policy in enumerate(POLICIES):
            llm.restart(policy=policy, pipeline_depth=index % 2)
            work = Workload(number=20, seed=index)
            work.params = [
                SamplingParams(temperature=float(rng.choice([0.0, 0.7])), max_tokens=params.max_tokens, seed=7)
                for params in work.params
            ]
            outputs = work.run(llm)
            assert len(outputs) == 20
        assert counter.count == 0
        counter.close()


def test_the_counter_counts() -> None:
    import jax

    counter = CompileCounter()
    jax.jit(lambda x: x * 3 + 1)(np.arange(7.0))
    assert counter.count > 0
    counter.close()
