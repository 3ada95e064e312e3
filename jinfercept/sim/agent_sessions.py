"""Sessions of agents as a trace has them: turns whose prompts begin with the prompt before, and the pauses between them.

Only counts and seconds: no text and no token ids. The compact form is JSON lines, one session each (docs/studies.md).
"""

import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sim.workload import MOST_TOKENS

TOOL = "tool"
"""Name of a tool that a trace does not name."""


class ScriptedTurn(NamedTuple):
    """A request of a session. `prompt`, `decode` (at least 1) and `kept` are tokens."""

    prompt: int
    decode: int
    # Leading tokens of the prompt that the session's context already has, below `prompt`: those that the last prompt began
    # with, and those that were generated behind it, as far as this prompt has them. A history that was compacted has far
    # fewer.
    kept: int
    pause_s: float  # seconds from the end of the last answer until this turn is submitted
    calls: bool  # the answer ends in a call that the client runs: the next pause is the tool's, else a person's
    tool: str = TOOL


class SubAgent(NamedTuple):
    """A session that begins after a turn of its parent, given by that turn's place, and then runs beside it."""

    after_turn: int
    session: "ScriptedSession"


class ScriptedSession(NamedTuple):
    """A session of at least one turn. After the last turn, the client does not return and sends no notice."""

    name: str
    # tokens of the tools and the system prompt, with which the prompts of all sessions begin
    shared: int
    turns: tuple[ScriptedTurn, ...]
    sub_agents: tuple[SubAgent, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest context, of sub-agents too."""
        own = max(turn.prompt + turn.decode for turn in self.turns)
        return max(own, *(sub.session.longest for sub in self.sub_agents)) if self.sub_agents else own


BLOCK_TOKENS = 64
"""Tokens of a block, in which the public traces of Claude Code count the common beginnings of prompts."""


def fitting(sessions: Sequence[ScriptedSession], max_model_len: int) -> list[ScriptedSession]:
    """The sessions whose contexts, with those of their sub-agents, are below `max_model_len`. Raises `ConfigError` if none
    is."""
    fit = [session for session in sessions if session.longest < max_model_len]
    if not fit:
        shortest = min(session.longest for session in sessions)
        fix = f"a --max-model-len over {shortest}, and as many --kv-tokens"
        raise ConfigError("no session of the trace fits", got=f"--max-model-len {max_model_len}", fix=fix)
    return fit


def compact_sessions(entries: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> list[ScriptedSession]:
    """Sessions from entries in the compact form, each with its sub-agents, in order. Raises `ConfigError` for other entries."""
    sessions: dict[str, ScriptedSession] = {}
    parents: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        session = _session(entry, f"{path}, line {number}")
        sessions[session.name] = session
        if "parent" in entry:
            parents[session.name] = entry["parent"]
    for name, parent in parents.items():
        if parent not in sessions:
            raise ConfigError("a sub-agent's parent is missing", got=parent, fix="give the line of its session")
        if parent in parents:
            raise ConfigError("a sub-agent has sub-agents", got=parent, fix="name the session that starts them all")
        sub = SubAgent(0, sessions[name])
        sessions[parent] = sessions[parent]._replace(sub_agents=(*sessions[parent].sub_agents, sub))
    return [session for name, session in sessions.items() if name not in parents]


def _session(entry: Mapping[str, Any], where: str) -> ScriptedSession:
    calls = entry.get("calls")
    if not isinstance(entry.get("id"), str) or not isinstance(calls, list) or not calls:
        fix = 'write {"id": text, "tools": tokens, "system": tokens, "calls": [[in, out, kept, think_s, api_s, stop, tool], …]}'
        raise ConfigError(f"{where}: this is not a session", got=reprlib.repr(entry), fix=fix)
    turns = list[ScriptedTurn]()
    for number, call in enumerate(calls, 1):
        turns.append(_turn(call, turns[-1] if turns else None, f"{where}, call {number}"))
    shared = sum(checked_number(entry.get(name, 0), name, where) for name in ("tools", "system"))
    return ScriptedSession(entry["id"], int(min(shared, turns[0].prompt - 1)), tuple(turns))


def _turn(call: object, last: ScriptedTurn | None, where: str) -> ScriptedTurn:
    if not isinstance(call, list) or len(call) not in (6, 7) or not isinstance(call[-1], str):
        fix = "write [in, out, kept, think_s, api_s, stop], and the name of the tool if it is known"
        raise ConfigError(f"{where}: this is not a call of a model", got=reprlib.repr(call), fix=fix)
    prompt, decode, kept = (
        int(checked_number(value, name, where)) for value, name in zip(call, ("in", "out", "kept"), strict=False)
    )
    pause_s = checked_number(call[3], "think_s", where)
    kept = kept_tokens(last, prompt, kept) if last is not None else 0
    tool = call[6] if len(call) == 7 else TOOL
    return ScriptedTurn(max(1, prompt), max(1, decode), kept, pause_s, call[5] != "end_turn", tool or TOOL)


def kept_tokens(last: ScriptedTurn, prompt: int, common: int, block: int = BLOCK_TOKENS) -> int:
    """Tokens that a prompt shares with the context before it; `common` counts whole blocks of the last prompt."""
    context = last.prompt + last.decode
    # all whole blocks are in common: so is the text generated behind them, if the new prompt is long enough for it
    if common + block > last.prompt and prompt > context:
        return context
    return max(0, min(common, last.prompt, prompt - 1))


def checked_number(value: object, name: str, where: str) -> float:
    """A number from a trace, from 0 to `MOST_TOKENS`. Raises `ConfigError` for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        fix = f"a number from 0 to {MOST_TOKENS:,}"
        raise ConfigError(f"{where}: {name} is no number", got=reprlib.repr(value), fix=fix)
    return value
