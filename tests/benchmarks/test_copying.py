"""`benchmarks copying` on a tiny model: a row of numbers, and the same tokens both ways."""

import json
from pathlib import Path

import pytest

from benchmarks import copying
from benchmarks.__main__ import main
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import GOLDEN

FLAGS = ["--dtype", "float32", "--load-format", "dummy", "--profile", "roofline-llama-13b-a100"]
SIZES = ["--kv-tokens", "4096", "--page-size", "32", "--max-num-batched-tokens", "8"]
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model without weights that has a tokenizer."""
    dimensions = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text())
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 1280}
    (tmp_path / "config.json").write_text(json.dumps(dimensions | changes))
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.slow
def test_the_table_has_the_same_tokens_both_ways(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "ROUNDS", 1)
    sizes = ["--batch", "2", "--new-tokens", "48", *SIZES, "--speculative-config", DRAFTS]
    assert main(["copying", model, *sizes, *FLAGS]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.startswith("batch")
    batch, *rates, per_step, accepted, same, of, requests = row.split()
    assert len(rates) == 3
    assert float(per_step) >= 1.0
    assert accepted.endswith("%")
    assert [batch, same, of, requests] == ["2", "2", "of", "2"]
