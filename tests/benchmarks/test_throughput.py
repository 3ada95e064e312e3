"""`benchmarks throughput`, `copying` and `weights` on tiny models: every cell, peers that are commands, the same tokens."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import throughput, weights_cost
from benchmarks.__main__ import main
from benchmarks.peers.peer_script import decode_rate
from benchmarks.throughput import Peer, ThroughputWork, measure, measure_peer
from jinfercept.config import LLMOptions
from jinfercept.errors import ConfigError
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.tiny_model import GOLDEN, tiny_llm


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


MODEL = str(GOLDEN / "llama_gqa")


WORK = ThroughputWork([1, 3], [9], 4)


SMALL = [
    "--batch",
    "1,3",
    "--context",
    "9",
    "--new-tokens",
    "4",
    "--dtype",
    "auto,float32",  # float32 once: it is what auto is on a CPU
    "--max-num-batched-tokens",
    "32",
]


def peer(tmp_path: Path, body: str) -> Peer:
    """An engine: a Python file that has read the work."""
    file = tmp_path / "engine.py"
    file.write_text(f"import json, sys\nwork = json.load(sys.stdin)\n{body}\n")
    return Peer("other", (sys.executable, str(file)))


ANSWER = """
cells = [dict(batch=b, context=c, decode_tokens_per_s=2.0 * b, prefill_tokens_per_s=1.0 * c)
         for b in work["batches"] for c in work["contexts"]]
print("a line of its log")
print(json.dumps({"version": work["dtype"], "cells": cells}))
"""


def test_only_tokens_count_that_come_while_all_requests_decode() -> None:
    assert decode_rate([[1.0, 2.0, 3.0]]) == 1.0
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [2.0, 2.5, 3.0, 4.0]]) == 3.0


def test_a_measurement_needs_kept_pages() -> None:
    options: LLMOptions = {"enable_prefix_caching": False, "max_num_batched_tokens": 4}
    with tiny_llm(**{**WORK.engine_options(page_size=4), **options}) as llm, pytest.raises(ConfigError, match="prefix"):
        measure(llm, WORK)


@pytest.mark.slow
def test_the_command_shows_ratios_and_writes_every_cell_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(throughput, "script_peer", lambda name: peer(tmp_path, ANSWER))
    assert main(["throughput", MODEL, *SMALL, "--peer", "other", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "decode other" in printed
    report = json.loads(out.read_text())
    assert {"device", "processor", "cores", "python", "new_tokens"} < report.keys()
    ours, other = report["engines"]
    assert (ours["engine"], other["engine"], other["version"]) == ("jinfercept", "other", "float32")
    assert ours["cells"][0].keys() == other["cells"][0].keys()
    assert [(cell["batch"], cell["context"]) for cell in ours["cells"]] == [(1, 9), (3, 9)]
    assert all(cell["decode_tokens_per_s"] > 0 and cell["prefill_tokens_per_s"] > 0 for cell in ours["cells"])


@pytest.mark.parametrize(
    ("body", "message"),
    [("sys.exit('no such weights')", "no such weights"), ("print('fast')", "got fast"), ("", "got nothing")],
)
def test_a_peer_that_fails_says_how(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_peer(peer(tmp_path, body), MODEL, "float32", WORK, 128)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "transformers=/no/such/python"], "the interpreter of --peer transformers cannot be run"),
        (["--peer", "vllm"], "the peer vllm cannot be imported"),
        (["--peer", "tgi"], "use one of transformers, vllm"),
        (["--new-tokens", "1"], "--new-tokens is too small"),
        (["--batch", "0"], "--batch is too small"),
        (["--dtype", "float16"], "no such --dtype"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_measured(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["throughput", MODEL, *flags]) == 2
    assert message in capsys.readouterr().err
