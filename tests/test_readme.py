"""The README's example does what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs_and_the_model_reads_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(example, {})
    shown = capsys.readouterr().out
    assert "<<price lamp=23>>" in shown
    assert "Interception(" in shown


def test_every_file_that_the_reading_order_names_is_there() -> None:
    package = Path(__file__).parent.parent / "jinfercept"
    named = re.findall(r"`([a-z_/]+\.py)`", README.split("## Reading order")[1])
    assert named
    missing = [name for name in named if not (package / name).exists() and not (package / "intercept" / name).exists()]
    assert not missing
