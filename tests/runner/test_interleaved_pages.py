"""An engine whose pages lie as a TPU has them, on a CPU with the reference: whatever is decided about contexts, the tokens are
the model's."""

from typing import Any

import pytest

from jinfercept.pallas.layouts.interleaved import FP8
from jinfercept.runner import page_transfers
from tests.support.tiny_model import Workload, count_ties, streams, tiny_llm

SIZES: dict[str, Any] = {"kv_tokens": 112, "max_model_len": 100, "max_num_batched_tokens": 16, "attention": "reference"}


@pytest.mark.parametrize(
    ("family", "policy", "flags"),
    [
        ("llama_gqa", "min_waste", {"staging_pages": 4}),
        pytest.param("gemma3", "preserve", {"num_window_tokens": 120}, marks=pytest.mark.slow),
        pytest.param("gptj", "swap", {"staging_pages": 4}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "min_waste", {}, marks=pytest.mark.slow),
    ],
)
def test_pages_of_a_tpu_give_the_greedy_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, policy: str, flags: dict[str, Any]
) -> None:
    monkeypatch.setattr(page_transfers, "INTERLEAVED_ON", ("cpu",))
    with tiny_llm(family, policy=policy, **SIZES, **flags) as llm:
        outputs = Workload(number=8, seed=7).run(llm, delay_s=0.002)
        assert sum(count_ties(family, output) for output in outputs) <= 1
        assert llm.counters.interceptions > 0


def test_pages_in_fp8_give_the_same_tokens_wherever_they_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "INTERLEAVED_ON", ("cpu",))
    work = Workload(number=8, seed=7)
    with tiny_llm("llama_gqa", policy="swap", kv_cache_dtype="fp8", **SIZES) as llm:
        assert {pages.dtype for pages in llm.engine.setup.runner.kv.layers} == {FP8}
        swapped = streams(work.run(llm, delay_s=0.002))
        assert llm.counters.copied_out > 0
        llm.restart(policy="discard")
        assert streams(work.run(llm, delay_s=0.002)) == swapped
