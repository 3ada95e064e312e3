"""Benchmarks of others: what is read from their results, the comparison with `/metrics`, and the runs themselves."""

import json
from pathlib import Path

import pytest

from benchmarks import foreign
from benchmarks.__main__ import main
from benchmarks.foreign import PROGRAMS, Counts


def test_counts_are_read_from_what_vllm_lm_eval_and_inspect_write(tmp_path: Path) -> None:
    result = {"completed": 4, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 8}
    (tmp_path / "vllm.json").write_text(json.dumps(result))
    assert PROGRAMS["vllm"].read(tmp_path) == Counts(5, 30, 8, 1)

    samples = tmp_path / "out" / "m" / "samples_tiny_1.jsonl"
    samples.parent.mkdir(parents=True)
    samples.write_text('{"resps": [[["-1", "False"]], [["-2", "False"]]]}\n{"resps": [[["-1", "True"]]]}\n')
    assert PROGRAMS["lm-eval"].read(tmp_path) == Counts(3, None, None, 0)

    (tmp_path / "vllm.json").unlink()
    usage = {"m": {"input_tokens": 10, "input_tokens_cache_read": 5, "output_tokens": 3}}
    events = [{"event": "model"}, {"event": "tool"}, {"event": "model", "error": "500"}]
    log = {"samples": [{"events": events}], "stats": {"model_usage": usage}}
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert PROGRAMS["inspect"].read(tmp_path) == Counts(2, 15, 3, 1)


def test_an_unknown_program_is_an_error_and_a_large_one_is_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_SETTLED_S", 0.0)
    monkeypatch.setattr(foreign, "_saved_tokenizer", lambda model, folder: folder)
    assert main(["foreign", "nothing"]) == 2
    assert "no such program" in capsys.readouterr().err
    monkeypatch.setenv("JINFERCEPT_CACHE", str(tmp_path))
    assert main(["foreign", "vllm", "--base-url", "http://127.0.0.1:9"]) == 0
    assert "takes gigabytes; --large installs it" in capsys.readouterr().out
    monkeypatch.setattr(foreign, "installed", lambda packages: tmp_path)
    assert main(["foreign", "inspect", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "the server has no /metrics" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_without_errors_and_counts_what_metrics_counts(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["foreign", name])
    shown = capsys.readouterr().out
    if "skipped: " in shown:
        pytest.skip(shown.partition("skipped: ")[2].strip())
    assert status == 0, shown
    assert "requests" not in shown.partition("differ: ")[2], shown
