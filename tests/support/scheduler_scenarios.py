"""Scheduling scenarios drawn for property tests."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from jinfercept.kv.side_pool import SideSizes
from jinfercept.sched.policies import SETTINGS
from jinfercept.sim.workload import Arrival, Script, Segment
from tests.support.scenario_run import BUCKETS, MAX_SEQS, NEVER, SIZE, Scenario, ScenarioRun, hangs

__all__ = ["BUCKETS", "ESTIMATORS", "MAX_SEQS", "NEVER", "SIZE", "Scenario", "ScenarioRun", "hangs", "scenarios"]

ESTIMATORS = ("elapsed", "history", "oracle")


@st.composite
def arrivals(draw: st.DrawFn, max_context: int) -> Arrival:
    """A request of at most `max_context` tokens; one in four fills them."""
    size = max_context if draw(st.integers(0, 3)) == 0 else draw(st.integers(3, max_context))
    prompt = draw(st.integers(1, max(1, size // 2)))
    room = size - prompt
    segments = []
    while room >= 3 and draw(st.booleans()):
        decode = draw(st.integers(1, min(6, room - 1)))
        returned = draw(st.integers(0, min(20, room - decode - 1)))
        segments.append(Segment(decode, draw(st.sampled_from([0.0, 0.005, 0.1, 0.1, 2.0, NEVER])), returned))
        room -= decode + returned
    script = Script(draw(st.sampled_from(["math", "chat"])), prompt, (*segments, Segment(room, None, 0)))
    return Arrival(draw(st.sampled_from([0.0, 0.0, 0.0, 0.03, 0.3, 2.0])), script)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Pools from one that holds nothing but the longest request; `fixed` options are not drawn."""
    num_pages = fixed.get("num_pages") or draw(st.integers(3, 14))
    coming = draw(st.lists(arrivals(num_pages * SIZE), min_size=1, max_size=8))

    def option(name: str, values: tuple[Any, ...]) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values))

    scenario = Scenario(
        tuple(coming),
        policy=option("policy", tuple(SETTINGS)),
        estimator=option("estimator", ESTIMATORS),
        depth=option("depth", (0, 1)),
        chunk_tokens=option("chunk_tokens", (1, 3, 12)),
        whole_prompts=option("whole_prompts", (False, False, True)),
        num_pages=num_pages,
        num_host_pages=option("num_host_pages", (0, 3, 40)),
        link_tokens_per_s=option("link_tokens_per_s", (1.0, 800.0, 1e6)),
        fixed_s=option("fixed_s", (0.001, 0.010)),
        num_tenants=option("num_tenants", (1, 1, 2, 3)),
    )
    beside = draw(st.sampled_from(["", "", "windows", "states"]))
    if beside == "states":
        num_states = draw(st.integers(1, 8))
        return replace(scenario, states=SideSizes(num_states, draw(st.sampled_from([0, 2, 20])), 3))
    if beside == "windows":
        window = draw(st.sampled_from([2, 9, 16]))
        return replace(scenario, windows=draw(windows(window, scenario.buckets[-1])))
    return scenario


@st.composite
def windows(draw: st.DrawFn, window: int, most_tokens: int) -> SideSizes:
    """Pools of layers with windows, from one that holds one running sequence."""
    slack = SIZE + 1
    each = (window + slack) // SIZE + 2
    num_pages = most_tokens // SIZE + 2 + each * draw(st.integers(1, 5))
    return SideSizes(num_pages, draw(st.sampled_from([0, 3, 40])), 0.5, window, slack)
