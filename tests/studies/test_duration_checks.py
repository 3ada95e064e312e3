"""What is read from forecasts of decision records, whose numbers can be worked out."""

import json
from pathlib import Path

import pytest

from studies.questions.duration_checks import ALL, check_durations, pinball


def test_forecasts_are_compared_with_how_long_the_call_still_lasted(tmp_path: Path) -> None:
    run = {"type": "run", "quantiles": [0.5, 0.9], "ages_s": [0.0, 1.0]}
    forecasts = [
        {"age_s": 0.0, "remaining_s": 3.0, "quantiles_s": [1.0, 4.0]},
        {"age_s": 1.5, "remaining_s": 0.5, "quantiles_s": [0.5, 0.5]},
    ]
    outcome = {"type": "outcome", "tools": ["a"], "returned": True, "call_s": 2.0, "forecasts": forecasts}
    ended_early = outcome | {"tools": ["b"], "call_s": 1.0}
    lines = [run, {"type": "decision"}, outcome, outcome | {"call_s": None}, outcome | {"returned": False}, ended_early]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    durations = check_durations(path)
    assert list(durations) == [ALL, "a", "b"]
    at_once, later = durations["a"]
    assert (at_once["age_s"], at_once["calls"], at_once["predicted_s"], at_once["actual_s"]) == (0.0, 1, 3.0, 2.0)
    assert at_once["returned"] == {"0.5": 0.0, "0.9": 1.0}
    assert at_once["pinball_s"] == pytest.approx((0.5 * 1.0 + 0.1 * 2.0) / 2)
    assert (later["age_s"], later["actual_s"], later["returned"]) == (1.0, 0.5, {"0.5": 1.0, "0.9": 1.0})
    assert [row["age_s"] for row in durations["b"]] == [0.0]


def test_the_quantile_loss_is_least_at_the_quantile() -> None:
    actual = [float(value) for value in range(101)]
    losses = {guess: sum(pinball(0.9, float(guess), value) for value in actual) for guess in range(101)}
    assert min(losses, key=losses.__getitem__) in (90, 91)
