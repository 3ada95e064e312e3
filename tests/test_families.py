"""Every family through pages, chunks and calls: greedy tokens are those of its model without a cache."""

from pathlib import Path

import numpy as np
import pytest

from jinfercept.models.load import load
from jinfercept.sampling_params import SamplingParams
from tests.models.test_variants import VARIANTS, write
from tests.support.dense_model import logits
from tests.support.tiny_model import Workload, count_ties, tiny_llm

SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *(
            "mistral",
            "mistral_windowed",
            "ministral3",
            "qwen2",
            "mixtral",
            "qwen3_moe",
            "qwen3_moe_mixed",
            "olmo2",
            "olmo3",
            "phi3",
            "granite",
        ),
        *(
            "smollm3",
            "gemma",
            "gemma2",
            "gemma3",
            "gpt_oss",
            "gpt_oss_mxfp4",
            "gptj_published",
            "qwen3_5",
            "qwen3_5_moe",
        ),
    )
]


@pytest.mark.parametrize("name", ["qwen3", *SLOW])
def test_tokens_of_a_family_do_not_depend_on_pages_and_calls(name: str) -> None:
    with tiny_llm(name, policy="discard", max_num_batched_tokens=8, max_num_seqs=4, kv_tokens=256) as llm:
        outputs = Workload(6, seed=1).run(llm)
    assert sum(count_ties(name, output) for output in outputs) <= 1


def test_an_engine_serves_sequences_beyond_a_longropes_original_length_by_its_long_factors(tmp_path: Path) -> None:
    variant = VARIANTS["longrope of phi3 beyond the original length"]
    directory = write(variant["base"], tmp_path / "model", variant["changes"], variant["added"])
    prompt, greedy = list(range(20)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with tiny_llm(str(directory), max_model_len=24, max_num_seqs=1, max_num_batched_tokens=8, kv_tokens=64) as llm:
        tokens = llm.generate({"prompt_token_ids": prompt}, greedy)[0].outputs[0].token_ids
    loaded = load(directory, dtype="float32").for_length(24)
    ours = np.asarray(logits(loaded.model, loaded.params, np.array(prompt + tokens)))
    assert tokens == ours[len(prompt) - 1 : -1].argmax(axis=1).tolist()
