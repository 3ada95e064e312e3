"""Every family through pages, chunks and calls: greedy tokens are those of its model without a cache."""

import pytest

from tests.support.tiny_model import Workload, count_ties, tiny_llm

SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *(
            "mistral",
            "mistral_windowed",
            "qwen2",
            "qwen3_moe",
            "qwen3_moe_mixed",
            "olmo2",
            "phi3",
            "granite",
            "smollm3",
            "gemma",
            "gemma2",
        ),
        "gptj_published",
    )
]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", *SLOW])
def test_tokens_of_a_family_do_not_depend_on_pages_and_calls(name: str) -> None:
    with tiny_llm(name, policy="discard", max_num_batched_tokens=8, max_num_seqs=4, kv_tokens=256) as llm:
        outputs = Workload(6, seed=1).run(llm)
    assert sum(count_ties(name, output) for output in outputs) <= 1
