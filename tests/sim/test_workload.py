"""Arrivals and scripts: rates, what a trace says, and that generated requests look like the trace."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sim.workload import (
    MIXED_WEIGHTS,
    Script,
    Segment,
    arrivals,
    draw,
    generate,
    load_trace,
)

SCRIPT = Script("chat", 1, (Segment(1, None, 0),))


def test_times_between_arrivals_are_those_of_a_poisson_process_with_the_rate() -> None:
    """About 20,000 arrivals: the mean within 5 %, the coefficient of variation within 5 %."""
    drawn = arrivals(lambda: SCRIPT, rate=4.0, duration_s=5000.0, rng=Random(1))
    gaps = [late.at_s - early.at_s for early, late in pairwise(drawn)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("rate", "duration_s", "name"),
    [
        (0.0, 1.0, "rate"),
        (float("nan"), 1.0, "rate"),
        (float("inf"), 1.0, "rate"),
        (1.0, -1.0, "duration_s"),
        (1.0, float("inf"), "duration_s"),
    ],
)
def test_arguments_out_of_range_are_refused(rate: float, duration_s: float, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of arrivals is out of range"):
        arrivals(lambda: SCRIPT, rate, duration_s, Random(0))


KINDS = tuple(MIXED_WEIGHTS)
NUM_DRAWS = 2000

Moments = tuple[float, float]
"""Mean and standard deviation."""


class Column(NamedTuple):
    """Statistics of the requests of one kind; `call_s` are those of the means of requests."""

    calls: Moments
    prompt: Moments
    context: Moments
    decode: Moments
    returned: Moments
    call_s: Moments


TRACE_COLUMN = {  # measured on the authors' mixed trace; the token after a last call counts as context, not as decode
    "math": Column((2.81, 1.32), (405, 18.4), (939, 429), (125, 139), (21.0, 4.88), (8.64e-5, 5.81e-5)),
    "qa": Column((3.04, 1.18), (934, 6.9), (1847, 246), (183, 137), (56.7, 8.5), (0.690, 0.175)),
    "ve": Column((5.35, 1.02), (1973, 0), (2050, 0.5), (4, 0), (10.2, 10.7), (0.0852, 0.0147)),
    "chat": Column((3.46, 1.96), (108, 263), (753, 367), (114, 158), (39.7, 112), (28.4, 15.5)),
    "image": Column((6.92, 3.92), (108, 263), (501, 356), (32.8, 28.5), (23.9, 80.9), (19.95, 7.78)),
    "tts": Column((6.92, 3.92), (108, 263), (505, 356), (32.8, 28.5), (24.4, 80.8), (17.17, 7.62)),
}


def moments(values: Sequence[float]) -> Moments:
    return fmean(values), pstdev(values)


def column(scripts: Sequence[Script]) -> Column:
    calling = [[segment for segment in script.segments if segment.call_s is not None] for script in scripts]
    answers = scripts[0].kind in ("math", "qa", "chat")
    return Column(
        calls=moments([script.calls for script in scripts]),
        prompt=moments([script.prompt for script in scripts]),
        context=moments([script.context for script in scripts]),
        decode=moments(
            [s.decode for script in scripts for s in script.segments if answers or s.call_s is not None],
        ),
        returned=moments([segment.returned for segments in calling for segment in segments]),
        call_s=moments([fmean([s.call_s or 0.0 for s in segments]) for segments in calling if segments]),
    )


def generated(kind: str, num: int = NUM_DRAWS) -> list[Script]:
    rng = Random(0)
    return [generate(kind, rng) for _ in range(num)]


def write(path: Path, *requests: Any) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def request(*segments: Any, prompt: Any = 5, kind: Any = "math") -> dict[str, Any]:
    return {"kind": kind, "prompt": prompt, "segments": list(segments)}


def test_a_request_that_ends_with_a_call_ends_one_token_after_it(tmp_path: Path) -> None:
    call, answer = {"decode": 4, "call_s": 2, "returned": 3}, {"decode": 6}
    with_answer, without = load_trace(write(tmp_path / "t.jsonl", request(call, answer), request(call)))
    assert with_answer == Script("math", 5, (Segment(4, 2.0, 3), Segment(6, None, 0)))
    assert without == Script("math", 5, (Segment(4, 2.0, 3), Segment(1, None, 0)))


CALL = {"decode": 4, "call_s": 2, "returned": 3}


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ([1], "line 2: this is not a JSON object"),
        ({"kind": "qa", "segments": [CALL]}, "line 2 cannot be read: 'prompt' is missing"),
        (request(CALL, kind=3), "no Script"),
        (request(CALL, prompt=0), "a prompt of no tokens"),
        (request(CALL, prompt=True), "a prompt of no tokens"),
        (request(), "a segment that generates nothing"),
        (request(7), "line 2 cannot be read: "),
        (request(CALL, {"decode": 0}), "a segment that generates nothing"),
        (request({"decode": 4}, CALL), "not exactly the last has no call"),
        (request({**CALL, "call_s": -1}), "whose call lasts no time"),
        (request({**CALL, "call_s": float("nan")}), "whose call lasts no time"),
        (request({**CALL, "returned": 1.5}), "returns no number of tokens"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, bad: Any, what: str) -> None:
    path = write(tmp_path / "t.jsonl", request(CALL), bad)
    with pytest.raises(ConfigError, match="fix: ") as caught:
        load_trace(path)
    assert f"{path}, line 2" in str(caught.value)
    assert what in str(caught.value)


def test_a_file_without_requests_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*nowhere"):
        load_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="has no requests"):
        load_trace(write(tmp_path / "t.jsonl"))
    (tmp_path / "t.jsonl").write_text("\n{\n")
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        load_trace(tmp_path / "t.jsonl")


def test_the_authors_trace_has_the_statistics_that_requests_are_generated_with() -> None:
    scripts = load_trace("paper")
    assert Counter(script.kind for script in scripts) == MIXED_WEIGHTS
    for kind, expected in TRACE_COLUMN.items():
        measured = column([script for script in scripts if script.kind == kind])
        for name, value in measured._asdict().items():
            assert value == pytest.approx(getattr(expected, name), rel=0.01, abs=0.05 if value[0] > 1 else 0), (
                kind,
                name,
            )


SAMPLED_KINDS = [pytest.param(kind, marks=() if kind in ("chat", "qa", "ve") else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_generated_requests_have_the_statistics_of_the_trace(kind: str) -> None:
    """Means within 8 %; deviations within 20 %, but contexts of conversations (35 %) and what the window decides (`ve`)."""
    measured, expected = column(generated(kind)), TRACE_COLUMN[kind]
    conversation = kind in ("chat", "image", "tts")
    for name, (mean, deviation) in measured._asdict().items():
        expected_mean, expected_deviation = getattr(expected, name)
        assert mean == pytest.approx(expected_mean, rel=0.08), name
        if kind != "ve" or name in ("calls", "call_s"):
            loose = conversation and name == "context"
            assert deviation == pytest.approx(expected_deviation, rel=0.35 if loose else 0.2), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_passes_the_window(kind: str) -> None:
    for script in generated(kind, num=200):
        assert script.prompt >= 1
        assert script.context <= 2048
        assert all(s.decode >= 1 and s.returned >= 0 and (s.call_s or 0) >= 0 for s in script.segments)
        assert [s.call_s is None for s in script.segments] == [False] * script.calls + [True]
        assert script.segments[-1].returned == 0


def test_persons_who_write_more_take_longer() -> None:
    replies = [s for script in generated("chat", num=300) for s in script.segments if s.call_s is not None]
    slow = [s.returned for s in replies if s.call_s and s.call_s >= 40]
    quick = [s.returned for s in replies if s.call_s and s.call_s < 20]
    assert fmean(slow) > 5 * fmean(quick)


def test_a_trace_of_too_many_digits_or_brackets_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    many = "1" + "0" * 400
    line = '{"kind": "qa", "prompt": %s, "segments": [{"decode": 1, "call_s": %s, "returned": 1}]}\n'
    for text, message in (
        (line % (5, many), "too large to convert to float"),
        (line % (many, 1), "a prompt of no tokens"),
        ("[" * 100_000, "line 1: not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_trace(path)
        assert len(str(caught.value)) < 400 + len(str(path))


def test_a_kind_that_there_is_not_is_refused() -> None:
    rng = Random(0)
    with pytest.raises(ConfigError, match=r"no such kind.*got 'cooking'.*math"):
        draw("cooking", rng)
    with pytest.raises(ConfigError, match="no such kind"):
        draw("mixed", rng, weights={"cooking": 1})
