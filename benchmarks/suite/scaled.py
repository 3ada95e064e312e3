"""Loads for a smaller machine: every number of tokens and every time multiplied."""

from collections.abc import Sequence

from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn, SubAgent
from jinfercept.sim.workload import Arrival, Segment


def scaled(arrivals: Sequence[Arrival], tokens: float, seconds: float) -> list[Arrival]:
    """The same arrivals with every number of tokens (at least 1) and every time multiplied."""

    def count(value: int) -> int:
        return max(1, round(value * tokens)) if value else 0

    def segment(value: Segment) -> Segment:
        call_s = None if value.call_s is None else value.call_s * seconds
        return Segment(count(value.decode), call_s, count(value.returned), value.tool)

    return [
        Arrival(
            at_s * seconds, script._replace(prompt=count(script.prompt), segments=tuple(map(segment, script.segments)))
        )
        for at_s, script in arrivals
    ]


def scaled_sessions(sessions: Sequence[ScriptedSession], tokens: float, seconds: float) -> list[ScriptedSession]:
    """The same sessions for a smaller machine: numbers of tokens and pauses multiplied."""

    def turn(value: ScriptedTurn) -> ScriptedTurn:
        prompt, decode = max(1, round(value.prompt * tokens)), max(1, round(value.decode * tokens))
        return value._replace(
            prompt=prompt,
            decode=decode,
            kept=min(prompt - 1, int(value.kept * tokens)),
            pause_s=value.pause_s * seconds,
        )

    return [
        session._replace(
            shared=int(session.shared * tokens),
            turns=tuple(map(turn, session.turns)),
            sub_agents=tuple(
                SubAgent(sub.after_turn, scaled_sessions([sub.session], tokens, seconds)[0])
                for sub in session.sub_agents
            ),
        )
        for session in sessions
    ]
