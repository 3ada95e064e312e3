"""Files of traces: the form of a file, by its content, and the sessions in it."""

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, Literal

from jinfercept.errors import ConfigError
from jinfercept.sim.agent_sessions import (
    TOOL,
    ScriptedSession,
    ScriptedTurn,
    SubAgent,
    checked_number,
    compact_sessions,
    kept_tokens,
)
from jinfercept.sim.workload import trace_objects

AGENTS_TRACE = Path(__file__).with_name("agents.jsonl")
"""36 sessions of Claude Code with 6 sub-agents, anonymised, in the compact form: a sample of the traces of
callanjfox/kv-cache-tester, Apache-2.0."""

TraceForm = Literal["scripts", "compact", "claude", "messages"]

_KEYS: Mapping[TraceForm, frozenset[str]] = {
    "scripts": frozenset(("prompt", "segments")),
    "compact": frozenset(("calls",)),
    "claude": frozenset(("requests",)),
    "messages": frozenset(("conversation_id", "turn", "role")),
}
CHARACTERS = 4
"""Characters that count as a token in a trace of texts."""


def claude_code_session(entry: Mapping[str, Any], where: str, name: str = "") -> ScriptedSession:
    """A session of a public trace of Claude Code. Raises `ConfigError` if it has no requests or a value is wrong."""
    size = int(checked_number(entry.get("block_size", 64), "block_size", where))
    turns, subs = list[ScriptedTurn](), list[SubAgent]()
    last: Mapping[str, Any] | None = None
    name = name or str(entry.get("id", where))
    for number, request in enumerate(_entries(entry.get("requests"), where, "requests"), 1):
        place = f"{where}, request {number}"
        if request.get("type") == "subagent" or "requests" in request:
            nested = {"block_size": size, **request}
            subs.append(SubAgent(max(0, len(turns) - 1), claude_code_session(nested, place, f"{name}.{len(subs)}")))
            continue
        blocks = request.get("hash_ids")
        if not isinstance(blocks, list):
            raise ConfigError(f"{place}: hash_ids is no list", got=reprlib.repr(blocks), fix="give the blocks' hashes")
        prompt, decode = (max(1, int(checked_number(request.get(key), key, place))) for key in ("in", "out"))
        if last is not None and request.get("type") == "n" and blocks == last["hash_ids"]:
            turns[-1] = turns[-1]._replace(decode=decode, calls=request.get("stop") != "end_turn")  # the stream failed
            continue
        pause_s = checked_number(request.get("think_time", 0.0), "think_time", place)
        if "think_time" not in request and last is not None:
            pause_s = max(0.0, request["t"] - last["t"] - last.get("api_time", 0.0))
        kept = 0
        if last is not None:
            common = size * _num_common(blocks, last["hash_ids"])
            kept = kept_tokens(turns[-1], prompt, common, size)
        turns.append(ScriptedTurn(prompt, decode, kept, pause_s if last else 0.0, request.get("stop") != "end_turn"))
        last = request
    if not turns:
        raise ConfigError(f"{where}: a session without requests", got=name, fix="give at least one")
    shared = sum(checked_number(entry.get(key, 0), key, where) for key in ("tool_tokens", "system_tokens"))
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
        where, name = f"{path}, line {number}", str(entry["conversation_id"])
        read = sum(
            _num_tokens(entry.get(key)) for key in ("content", "reasoning_content", "tool_calls", "tool_results")
        )
        if entry["role"] != "assistant":
            first = sum(_num_tokens(entry.get(key)) for key in ("system", "tools"))
            shared.setdefault(name, first)
            context[name] = context.get(name, 0) + first + read
            delay_s = checked_number(entry.get("delay_seconds", 0.0), "delay_seconds", where)
            pauses[name] = pauses.get(name, 0.0) + delay_s
            continue
        if name not in context:
            raise ConfigError(f"{where}: a conversation begins with its answer", got=name, fix="give its messages")
        earlier = turns.setdefault(name, [])
        kept = earlier[-1].prompt + earlier[-1].decode if earlier else 0
        calls = _entries(entry.get("tool_calls") or [], where, "tool_calls")
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


def _entries(value: object, where: str, name: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError(f"{where}: {name} is no list of objects", got=reprlib.repr(value), fix=f"give the {name}")
    return value


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
