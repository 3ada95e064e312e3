"""`python -m benchmarks overload`: what is said of replies, and options that are refused."""

import pytest

from benchmarks.__main__ import main
from benchmarks.client import Reply
from benchmarks.overload import KeyReply, OverloadBench

BENCH = OverloadBench("tiny", {}, 8, 8, 1.0, 8.0, 2, 0)


def replies(key: str, first_s: float, number: int, refused: int = 0) -> list[KeyReply]:
    served = [KeyReply(key, 3.0, Reply(0.0, first_s, 2.0)) for _ in range(number)]
    return served + [KeyReply(key, 3.0, Reply(0.0, error="HTTP 429")) for _ in range(refused)]


def test_goodput_counts_what_began_in_time_and_keys_are_compared_with_themselves_alone() -> None:
    by_load = {("takes all", 1.0): replies("a", 0.5, 12), ("takes all", 2.0): replies("a", 3.0, 24)}
    by_load |= {("refuses early", 1.0): replies("a", 0.5, 12), ("refuses early", 2.0): replies("a", 0.9, 12, 12)}
    by_key = {"fair, no greedy key": replies("b", 0.2, 4), "fair": [*replies("b", 0.3, 4), *replies("greedy", 9.0, 40)]}
    answer = BENCH._answer(by_load, by_key)  # pyright: ignore[reportPrivateUsage]
    loads, keys = answer.tables
    assert [row[3] for row in loads.rows] == ["2.00", "0.00", "2.00", "2.00"], "of the six seconds that count"
    assert [row[-2] for row in loads.rows] == ["0", "0", "0", "12"]
    assert [(row[0], row[1], row[-3]) for row in keys.rows] == [("fair, no greedy key", "4", ""), ("fair", "4", "1.50")]
    assert answer.findings[0].endswith("is 0.00 of its maximum.")
    assert answer.findings[1].endswith("is 1.00 of its maximum.")


def test_an_option_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overload", "tiny", "--seconds", "0"]) == 2
    assert "--seconds is too small" in capsys.readouterr().err
