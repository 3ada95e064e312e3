"""Loads for a smaller machine."""

from benchmarks.suite.scaled import scaled, scaled_sessions
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.trace_files import load_sessions
from jinfercept.sim.workload import Script, Segment


def test_scaling_keeps_at_least_a_token_and_returns_nothing_where_nothing_was_returned() -> None:
    script = Script("math", 40, (Segment(3, 2.0, 0), Segment(100, 5.0, 4), Segment(1, None, 0)))
    [(at_s, small)] = scaled([Arrival(10.0, script)], 0.1, 0.5)
    assert at_s == 5.0
    assert small == Script("math", 4, (Segment(1, 1.0, 0), Segment(10, 2.5, 1), Segment(1, None, 0)))


def test_the_trace_of_agents_ships_and_can_be_scaled() -> None:
    sessions = load_sessions("agents")
    assert len(sessions) == 36
    small = scaled_sessions(sessions, 0.01, 0.1)
    assert max(session.longest for session in small) < 4_100
    assert all(turn.kept < turn.prompt for session in small for turn in session.turns)
