"""The Chrome trace of a small contended run: what Perfetto needs, and what a reader relies on."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.recording import RecordFiles
from jinfercept.sim.scripted import Progress
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import draw

SIMULATION = Simulation(
    PROFILES["paper-gptj-6b-a100"], "min_waste", duration_s=15.0, kv_tokens=6144, host_tokens=4096, max_model_len=2100
)
Events = list[dict[str, Any]]


def crowd() -> list[Arrival]:
    rng = Random(1)
    return arrivals(lambda: draw("mixed", rng), 1.5, SIMULATION.duration_s, rng)


def events(path: Path) -> Events:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def spans(trace_events: Events) -> dict[int, Events]:
    """The spans of each request, in the order of their beginnings."""
    by_track: dict[int, Events] = defaultdict(list)
    for event in trace_events:
        if event["ph"] == "X":
            by_track[event["tid"]].append(event)
    return {
        track: sorted(own, key=lambda span: (span["ts"], span["ts"] + span["dur"])) for track, own in by_track.items()
    }


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Events:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    report = SIMULATION.run(crowd(), records=RecordFiles(chrome_trace=str(path)))
    assert report["copied_out_tokens"] > 0
    return events(path)


def test_every_request_has_a_track_with_its_name(trace: Events) -> None:
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names.keys() == spans(trace).keys()
    assert sorted(names.values()) == sorted(f"request {number}" for number in range(len(crowd())))


def test_spans_follow_one_another_from_arrival_to_end(trace: Events) -> None:
    for own in spans(trace).values():
        assert own[0]["name"] == "waiting"
        assert own[0]["args"]["because"] == "new"
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] == after["ts"]
            assert before["name"] != after["name"]


def test_a_pause_says_what_was_done_with_its_context(trace: Events) -> None:
    pauses = [event for event in trace if event["ph"] == "X" and event["name"] == "intercepted"]
    assert {tuple(pause["args"]["tools"]) for pause in pauses} > {("ve",), ("math",)}
    for pause in pauses:
        args = pause["args"]
        assert args["interception"] >= 1
        assert sum(args["at_start"].values()) == sum(args["at_end"].values())
        changed = args["at_start"] != args["at_end"]
        assert not changed or args["moves"]
    assert any(pause["args"]["at_end"]["host"] for pause in pauses)


def test_the_moves_of_a_plan_are_instants_on_the_requests_track(trace: Events) -> None:
    instants = [event for event in trace if event["ph"] == "i"]
    assert {event["name"].split(": ")[0] for event in instants} >= {"copy", "drop from the device"}
    moved, named = (
        sum(event["args"]["pages"] for event in instants),
        sum(sum(event["args"].get("moves", {}).values()) for event in trace if event["ph"] == "X"),
    )
    assert moved == named


def test_page_counters_add_up_to_the_pools(trace: Events) -> None:
    for name, pool in (("device pages", SIMULATION.kv_tokens), ("host pages", SIMULATION.host_tokens)):
        counts = [event["args"] for event in trace if event["ph"] == "C" and event["name"] == name]
        assert len(counts) > 10
        assert {sum(count.values()) for count in counts} == {pool // SIMULATION.page_size}


def test_link_and_query_counters_stay_within_their_limits(trace: Events) -> None:
    counters = {event["name"]: [] for event in trace if event["ph"] == "C"}
    for event in trace:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert max(count["out"] + count["in"] for count in counters["link tokens"]) > 0
    for count in counters["query tokens"]:
        assert count["recomputed"] <= count["query"] <= count["saturation"]
    for count in counters["link tokens"]:
        assert count["out"] + count["in"] <= count["budget"] + 2 * SIMULATION.page_size


def test_a_trace_that_is_interrupted_is_whole(tmp_path: Path) -> None:
    def interrupt() -> Progress:
        looks = iter(range(20))

        def progress(now: float, end: float) -> None:
            if next(looks, None) is None or now > 0:
                raise KeyboardInterrupt

        return progress

    path = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt):
        SIMULATION.run(crowd(), interrupt(), RecordFiles(chrome_trace=str(path)))
    assert spans(events(path))


def test_a_trace_changes_nothing_of_the_run(tmp_path: Path) -> None:
    plain = SIMULATION.run(crowd())
    traced = SIMULATION.run(crowd(), records=RecordFiles(chrome_trace=str(tmp_path / "trace.json")))
    assert plain | {"sim_wall_s": 0} == traced | {"sim_wall_s": 0}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        SIMULATION.run([], records=RecordFiles(chrome_trace=str(tmp_path)))


def test_the_files_of_several_runs_have_several_names() -> None:
    records = RecordFiles("out/decisions.jsonl", "trace.json").of("lru-5-0")
    assert records == RecordFiles("out/decisions-lru-5-0.jsonl", "trace-lru-5-0.json")
    assert RecordFiles(None, "trace").of("a") == RecordFiles(None, "trace-a")
