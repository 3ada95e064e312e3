"""The cost of updates of the weights is measured from every source, whatever the machine does."""

import pytest

from benchmarks import weights_cost
from tests.support.tiny_model import GOLDEN


@pytest.mark.slow
def test_updates_from_every_source_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cost, "_WARM", 1)
    monkeypatch.setattr(weights_cost, "_TIMED", 1)
    flags = {"dtype": "float32", "profile": "paper-gptj-6b-a100", "kv_tokens": 512, "max_num_batched_tokens": 32}
    costs, growth = weights_cost.measure(str(GOLDEN / "llama_gqa"), 10, flags)
    assert [cost.source.split()[-1] for cost in costs] == ["device", "numpy", "them", "checkpoint"]
    for cost in costs:
        assert cost.seconds > 0
        assert 1 <= cost.live < 3
    assert [step.updates for step in growth] == [2, 4, 6, 8, 10]
    assert growth[0].live == growth[-1].live
