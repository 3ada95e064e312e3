"""Recorded traffic: spans and logs become sessions, and what cannot be read is refused by name."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.planner.traffic import read_traffic
from jinfercept.sim.workload import Script, Segment

SESSION = Script("recorded", 100, (Segment(20, 2.0, 30), Segment(10, None, 0)))


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def span(began: float, ended: float, prompt: Any, new: Any, conversation: str = "c") -> dict[str, Any]:
    tokens = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": new}
    times = {"startTimeUnixNano": str(int(began * 1e9)), "endTimeUnixNano": str(int(ended * 1e9))}
    return {"name": "chat m", **times, "attributes": tokens | {"gen_ai.conversation.id": conversation}}


def otlp(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def listed(recorded: dict[str, Any]) -> dict[str, Any]:
        kinds = {int: "intValue", str: "stringValue"}
        attributes = [{"key": k, "value": {kinds[type(v)]: str(v)}} for k, v in recorded["attributes"].items()]
        return recorded | {"attributes": attributes}

    return {"resourceSpans": [{"scopeSpans": [{"spans": [listed(recorded) for recorded in spans]}]}]}


def log(time: str, seconds: float, prompt: int, new: int, cached: int, key: str = "k") -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "cached_tokens": cached}
    return {"time": f"2026-01-01T00:00:{time}+0000", "seconds": seconds, "path": "/v1/x", "key": key} | usage


def test_spans_of_a_conversation_are_a_session(tmp_path):
    spans = [span(13, 14, 150, 10), span(10, 11, 100, 20), span(12, 12.5, 7, 1, "other"), {"attributes": {}}]
    for lines in (spans, [otlp(spans)]):
        traffic = read_traffic(written(tmp_path / "spans.jsonl", lines))
        assert SESSION in traffic.scripts
        assert len(traffic.scripts) == 2
        assert traffic.rate == pytest.approx(2 / 4)


def test_a_history_that_was_cut_begins_a_session(tmp_path):
    spans = [span(10, 11, 100, 20), span(13, 14, 60, 10)]
    assert len(read_traffic(written(tmp_path / "spans.jsonl", spans)).scripts) == 2


def test_requests_of_the_log_are_joined_by_what_they_found_cached(tmp_path):
    lines = [
        log("11", 1.0, 100, 20, 0),
        {"time": "x", "message": "started"},
        log("14", 1.0, 150, 10, 119),
        log("15", 0.5, 150, 10, 119, key="another"),
    ]
    traffic = read_traffic(written(tmp_path / "server.log", lines))
    assert sorted(len(script.segments) for script in traffic.scripts) == [1, 2]
    assert SESSION in traffic.scripts


def test_a_trace_of_simulate_is_read_as_such(tmp_path):
    line = {"kind": "chat", "prompt": 5, "segments": [{"decode": 3}]}
    traffic = read_traffic(written(tmp_path / "trace.jsonl", [line]))
    assert (traffic.scripts, traffic.rate) == ([Script("chat", 5, (Segment(3, None, 0),))], None)


@pytest.mark.parametrize(
    "lines", [[], ["{"], ["[1]"], ["[" * 100_000], [{"a": 1}], [span(1, 2, True, 1)], [span(1, 2, 10**30, 1)]]
)
def test_what_is_no_traffic_is_refused(tmp_path, lines):
    with pytest.raises(ConfigError, match=r"gen_ai\.usage"):
        read_traffic(written(tmp_path / "bad.jsonl", lines))
