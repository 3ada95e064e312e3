"""Sessions of agents as a fleet sees them: turns whose prompts grow, each sent when the tool calls of the last have returned.

A `Script` of `sim.workload` is a session: a segment is a turn, its call is run by the client, and the next turn's prompt is all
tokens so far with those that the call returned. No tokens are made here: only counts, and the keys that a router sees.
"""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from jinfercept.fleet.conversations import KeyedPrefix, RoutingHint
from jinfercept.sim.arrivals import arrival_times
from jinfercept.sim.workload import Script

SYSTEM_TOKENS = 2000
"""Tokens of the system prompt that sessions share, in the workloads with a name."""


class AgentSession(NamedTuple):
    """A session.

    Attributes:
        at_s: second of its first turn.
        shared_tokens: of the prompt that all sessions begin with.
    """

    number: int
    at_s: float
    script: Script
    shared_tokens: int = 0


class Turn(NamedTuple):
    """A request of a session.

    Attributes:
        number: its place there, from 0.
        at_s: second at which it is sent.
        prompt_tokens: with all that came before it.
    """

    session: AgentSession
    number: int
    at_s: float
    prompt_tokens: int

    @property
    def new_tokens(self) -> int:
        """Tokens that it generates."""
        return self.session.script.segments[self.number].decode

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt that some replica has computed before: all but the new message, if no context was lost."""
        if self.number == 0:
            return self.session.shared_tokens if self.session.number else 0
        return self.prompt_tokens - self.session.script.segments[self.number - 1].returned

    def after(self, finished_s: float) -> "Turn | None":
        """The next turn, if this one finishes at a second; None for the last, or if its call never returns."""
        segment = self.session.script.segments[self.number]
        if segment.call_s is None or segment.call_s == math.inf:
            return None
        prompt_tokens = self.prompt_tokens + segment.decode + segment.returned
        return Turn(self.session, self.number + 1, finished_s + segment.call_s, prompt_tokens)

    def hint(self) -> RoutingHint:
        """The hint of a turn whose client sends no name: a key for the shared part, one for each turn so far."""
        session, segments = self.session, self.session.script.segments
        tokens = session.shared_tokens + session.script.prompt
        prefixes = [KeyedPrefix(_key(0, 0), session.shared_tokens)] if session.shared_tokens else []
        for number in range(self.number + 1):
            prefixes.append(KeyedPrefix(_key(session.number + 1, number), tokens))
            tokens += segments[number].decode + segments[number].returned
        opening = _key(session.number + 1, 0)
        return RoutingHint("", None, None, opening, tuple(reversed(prefixes[-256:])), self.prompt_tokens)


def _key(owner: int, place: int) -> bytes:
    return (owner << 32 | place).to_bytes(16, "big")


def first_turn(session: AgentSession) -> Turn:
    return Turn(session, 0, session.at_s, session.shared_tokens + session.script.prompt)


def draw_sessions(
    source: Callable[[Random], Callable[[], Script]], rate: float, duration_s: float, seed: int, shared_tokens: int = 0
) -> Iterator[AgentSession]:
    """Sessions that begin at a rate, Poisson, each drawn when it is asked for.

    Args:
        source: makes a draw of scripts from a random state.
        rate: sessions per second.
        duration_s: seconds in which sessions begin.
    """
    rng = Random(seed)
    draw = source(rng)
    times = arrival_times(rate, duration_s, rng)
    for number, at_s in enumerate(times):
        yield AgentSession(number, at_s, draw(), shared_tokens)
