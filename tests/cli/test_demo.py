"""`jinfercept demo` without its model: its tools, its prompts and the options that it refuses."""

import pytest

from jinfercept.cli.demo import PRICES, calculator, prompts, shop
from jinfercept.cli.main import main


@pytest.mark.parametrize(("expression", "value"), [("48/2", "24"), (" 6*3 ", "18"), ("7/2", "3.50"), ("2+3*4-1", "13")])
def test_the_calculator_computes_what_the_model_writes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "a+1", "2**9", "(1).real", "-1"])
def test_the_calculator_runs_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match="only"):
        calculator(expression)


def test_every_question_has_a_price_and_no_context_begins_as_another_one() -> None:
    assert shop(0.0)(" Pencil ") == str(PRICES["pencil"])
    first_lines = [prompt.splitlines()[0] for prompt in prompts(40)]
    assert len(set(first_lines)) == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--model", "x"], "--model is allowed only with --async"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err
