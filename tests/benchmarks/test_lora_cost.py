"""The cost of adapters is measured on both steps, whatever the machine does."""

import pytest

from benchmarks.lora_cost import MODULES, Sizes, measure
from tests.support.tiny_model import GOLDEN


@pytest.mark.slow
def test_every_step_is_measured_with_and_without_adapters() -> None:
    flags = {"dtype": "float32", "profile": "paper-gptj-6b-a100", "kv_tokens": 2560, "max_num_batched_tokens": 32}
    costs = measure(str(GOLDEN / "llama_gqa"), Sizes(2, 4, (1, 4)), flags)
    assert [(cost.modules, cost.rows) for cost in costs] == [(name, rows) for name in MODULES for rows in (1, 4)]
    assert all(min(cost.base_s, cost.unused_s, cost.adapted_s) > 0 for cost in costs)
