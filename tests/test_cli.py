"""The command line: flags are the options of `LLM`, mistakes are one line and status 2."""

from dataclasses import fields

import pytest

from jinfercept.cli import main
from jinfercept.config import SECTIONS


def test_every_option_is_a_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for section in SECTIONS:
        for field in fields(section):
            assert "--" + field.name.replace("_", "-") in shown


def test_a_mistake_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such/model", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.strip().startswith("jinfercept: there is no such model")
    assert "fix:" in error


def test_run_completes_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-tokens", "256", "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-tokens", "4"]
    assert main(["run", "smollm2-135m", "--prompt", "The capital of France is", *flags]) == 0
    assert "Paris" in capsys.readouterr().out


def test_info_tells_a_models_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "smollm2-135m"]) == 0
    shown = capsys.readouterr().out
    assert "45 KiB per token" in shown
