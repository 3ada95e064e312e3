"""`benchmarks copying` on a tiny model: a row of numbers, and the same tokens both ways."""

import json
from pathlib import Path

import pytest

from benchmarks import weights_cost
from benchmarks.__main__ import main
from benchmarks.lora_cost import MODULES, Sizes, measure
from tests.support.sample_tokenizers import VOCAB, byte_level
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


@pytest.mark.slow
def test_every_step_is_measured_with_and_without_adapters() -> None:
    flags = {"dtype": "float32", "profile": "paper-gptj-6b-a100", "kv_tokens": 2560, "max_num_batched_tokens": 32}
    costs = measure(str(GOLDEN / "llama_gqa"), Sizes(2, 4, (1, 4)), flags)
    assert [(cost.modules, cost.rows) for cost in costs] == [(name, rows) for name in MODULES for rows in (1, 4)]
    assert all(min(cost.base_s, cost.unused_s, cost.adapted_s) > 0 for cost in costs)


FLAGS = ["--dtype", "float32", "--load-format", "dummy", "--profile", "roofline-llama-13b-a100"]
SIZES = ["--kv-tokens", "4096", "--page-size", "32", "--max-num-batched-tokens", "8"]
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model without weights that has a tokenizer."""
    dimensions = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text())
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 1280}
    (tmp_path / "config.json").write_text(json.dumps(dimensions | changes))
    byte_level().save(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_the_table_has_the_same_tokens_both_ways(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--new-tokens", "48", *SIZES, "--speculative-config", DRAFTS]
    assert main(["copying", model, *sizes, *FLAGS]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.startswith("batch")
    batch, *numbers, same, of, requests = row.split()
    rates, per_step, accepted = numbers[:3], numbers[3], numbers[4:]
    assert len([float(rate) for rate in rates]) == 3
    assert float(per_step) >= 1.0
    assert all(share.rstrip(",").endswith("%") for share in accepted)
    assert [batch, same, of, requests] == ["2", "2", "of", "2"]
