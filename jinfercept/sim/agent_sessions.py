"""Sessions of agents as a trace has them: turns whose prompts begin with the prompt before, and the pauses between them.

Only counts and seconds: no text and no token ids. The form of a trace is known by its content. The compact form is JSON lines,
one session each (docs/studies.md).
"""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.sim.workload import checked_number, reading, trace_objects

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
    fix = '{"id": text, "tools": tokens, "system": tokens, "calls": [[in, out, kept, think_s, api_s, stop, tool], …]}'
    turns = list[ScriptedTurn]()
    with reading(where, entry, fix):
        for prompt, decode, kept, pause_s, _, stop, *named in entry["calls"]:
            prompt, decode, kept = (int(checked_number(value)) for value in (prompt, decode, kept))
            kept = kept_tokens(turns[-1], prompt, kept) if turns else 0
            tool = str(named[0]) if named and named[0] else TOOL
            calls = stop != "end_turn"
            turns.append(ScriptedTurn(max(1, prompt), max(1, decode), kept, checked_number(pause_s), calls, tool))
        if not turns:
            raise ValueError("it has no calls")
        shared = sum(checked_number(entry.get(name, 0)) for name in ("tools", "system"))
        return ScriptedSession(str(entry["id"]), int(min(shared, turns[0].prompt - 1)), tuple(turns))


def kept_tokens(last: ScriptedTurn, prompt: int, common: int, block: int = BLOCK_TOKENS) -> int:
    """Tokens that a prompt shares with the context before it; `common` counts whole blocks of the last prompt."""
    context = last.prompt + last.decode
    # all whole blocks are in common: so is the text generated behind them, if the new prompt is long enough for it
    if common + block > last.prompt and prompt > context:
        return context
    return max(0, min(common, last.prompt, prompt - 1))


AGENTS_TRACE = Path(__file__).with_name("agents.jsonl")
"""36 sessions of Claude Code with 6 sub-agents, anonymised, in the compact form: a sample of the traces of
callanjfox/kv-cache-tester, Apache-2.0."""

TraceForm = Literal["scripts", "compact", "claude", "messages"]

_KEYS: Mapping[TraceForm, frozenset[str]] = {
    "scripts": frozenset(("prompt", "segments")),
    "compact": frozenset(("calls",)),
    "claude": frozenset(("requests",)),
    "messages": frozenset(("conversation_id", "role")),
}
CHARACTERS = 4
"""Characters that count as a token in a trace of texts."""


def claude_code_session(entry: Mapping[str, Any], where: str, name: str = "") -> ScriptedSession:
    """A session of a public trace of Claude Code. Raises `ConfigError` if it has no requests or a value is wrong."""
    turns, subs = list[ScriptedTurn](), list[SubAgent]()
    last: Mapping[str, Any] | None = None
    with reading(where, entry, "give sessions of requests with in, out and hash_ids"):
        name, size = name or str(entry.get("id", where)), int(checked_number(entry.get("block_size", 64)))
        for request in entry["requests"]:
            if request.get("type") == "subagent" or "requests" in request:
                nested = {"block_size": size, **request}
                subs.append(SubAgent(max(0, len(turns) - 1), claude_code_session(nested, where, f"{name}.{len(subs)}")))
                continue
            blocks, calls = request["hash_ids"], request.get("stop") != "end_turn"
            prompt, decode = (max(1, int(checked_number(request[key]))) for key in ("in", "out"))
            if last is not None and request.get("type") == "n" and blocks == last["hash_ids"]:
                turns[-1] = turns[-1]._replace(decode=decode, calls=calls)  # the stream failed
                continue
            pause_s, kept = 0.0, 0
            if last is not None:
                pause_s = request.get(
                    "think_time", max(0.0, request.get("t", 0) - last.get("t", 0) - last.get("api_time", 0))
                )
                kept = kept_tokens(turns[-1], prompt, size * _num_common(blocks, last["hash_ids"]), size)
            turns.append(ScriptedTurn(prompt, decode, kept, checked_number(pause_s), calls))
            last = request
        shared = sum(checked_number(entry.get(key, 0)) for key in ("tool_tokens", "system_tokens"))
        return ScriptedSession(name, int(min(shared, turns[0].prompt - 1)), tuple(turns), tuple(subs))


def message_sessions(entries: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> list[ScriptedSession]:
    """The conversations of a trace of messages, such as MLCommons' agentic workloads. Every message of the assistant is a
    turn.

    Raises `ConfigError` for a wrong value, and for a conversation that begins with its answer.
    """
    turns: dict[str, list[ScriptedTurn]] = {}
    shared: dict[str, int] = {}
    context, pauses = dict[str, int](), dict[str, float]()
    for number, entry in enumerate(entries, 1):
        with reading(f"{path}, line {number}", entry, "give every conversation's messages, a user's first"):
            name = str(entry["conversation_id"])
            parts = ("content", "reasoning_content", "tool_calls", "tool_results")
            read = sum(_num_tokens(entry.get(key)) for key in parts)
            if entry["role"] != "assistant":
                first = sum(_num_tokens(entry.get(key)) for key in ("system", "tools"))
                shared.setdefault(name, first)
                context[name] = context.get(name, 0) + first + read
                pauses[name] = pauses.get(name, 0.0) + checked_number(entry.get("delay_seconds", 0.0))
                continue
            earlier = turns.setdefault(name, [])
            kept = earlier[-1].prompt + earlier[-1].decode if earlier else 0
            calls = list(entry.get("tool_calls") or [])
            tool = str(dict(calls[0].get("function") or {}).get("name", TOOL)) if calls else TOOL
            # the `delay_seconds` of the messages since the last turn
            pause_s = pauses.pop(name, 0.0) if earlier else 0.0
            earlier.append(ScriptedTurn(max(context[name], kept + 1), max(1, read), kept, pause_s, bool(calls), tool))
            context[name] = earlier[-1].prompt + earlier[-1].decode
    return [
        ScriptedSession(name, min(shared[name], of_session[0].prompt - 1), tuple(of_session))
        for name, of_session in turns.items()
    ]


def _num_tokens(value: object) -> int:
    text = value if isinstance(value, str) else json.dumps(value) if value else ""
    return len(text) // CHARACTERS


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, first, second)))


def trace_form(path: str | Path) -> TraceForm:
    """The form of a file by the keys of its first object; a folder of JSON files is "claude". Raises `ConfigError` for other
    keys."""
    if path == "paper":
        return "scripts"
    path = _place(path)
    if path.is_dir():
        return "claude"
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
            entry = json.loads(line if line.rstrip().endswith("}") else line + file.read())
    # a file without a form is taken for scripts, whose reader says what is wrong
    except (OSError, ValueError, RecursionError):
        return "scripts"
    if not isinstance(entry, dict) or "kind" in entry:
        return "scripts"
    for form, keys in _KEYS.items():
        if keys <= entry.keys():
            return form
    fix = "scripts, sessions in the compact form, or a trace of Claude Code or of messages (docs/studies.md)"
    raise ConfigError(f"{path} has no known form of a trace", got=f"keys {', '.join(entry)}", fix=fix)


def load_sessions(path: str | Path) -> list[ScriptedSession]:
    """The sessions of a trace, each with its sub-agents, in the trace's order. Raises `ConfigError` if it has none."""
    # `agents` is the trace that ships with the package
    form, path = trace_form(path), _place(path)
    if form == "claude":
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        sessions = [claude_code_session(entry, str(file)) for file in files for entry in trace_objects(file).values()]
    else:
        read = message_sessions if form == "messages" else compact_sessions
        sessions = read(list(trace_objects(path).values()), path)
    if not sessions:
        raise ConfigError("the trace has no sessions", got=path, fix="write one session a line")
    return sessions


def _place(path: str | Path) -> Path:
    return AGENTS_TRACE if path == "agents" else Path(path)
