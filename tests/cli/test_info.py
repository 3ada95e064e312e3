"""`jinfercept info`: what a model takes on one device and on each of several, and how wrong ones are refused."""

from pathlib import Path

import pytest

from jinfercept.cli.main import main
from tests.models.test_variants import VARIANTS, write
from tests.support.tiny_model import GOLDEN

MODEL = str(GOLDEN / "llama_gqa")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["info", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_each_of_several_devices_takes_a_part_and_kv_heads_that_are_too_few_are_stored_more_than_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    alone, each = shown(capsys, MODEL), shown(capsys, MODEL, "-tp", "4")
    assert "each of 2 stored 2 times" in each
    assert "stored" not in alone
    assert "bfloat16, on each of 4 devices" in each


def test_a_longrope_says_how_long_sequences_may_be_with_its_long_factors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    variant = VARIANTS["longrope of phi3"]
    directory = write(variant["base"], tmp_path / "model", variant["changes"], variant["added"])
    assert "64, up to 128 with --max-model-len" in shown(capsys, str(directory))


@pytest.mark.parametrize(("longest", "kept"), [(128, True), (79, False)])
def test_layers_keep_their_windows_only_where_they_have_a_pool_of_their_own(
    longest: int, kept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default they have one from four windows of 20 tokens on."""
    monkeypatch.setenv("COLUMNS", "200")
    variant = "gemma2", tmp_path / "model", {"max_position_embeddings": longest}, {}
    told = shown(capsys, str(write(*variant)))
    assert "1 of 2 see 20 tokens" in told
    assert ("for the last 20 tokens only" in told) == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL, "-tp", "0"], "tensor_parallel_size is too small; got 0; fix: at least 1"),
        ([MODEL, "-tp", "3"], "of 1, 2, 4"),
        (["no/such/model"], "no such model"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
