"""Files of traces: which form a file has by its content, and the sessions in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jinfercept.errors import ConfigError
from jinfercept.sim.agent_sessions import ScriptedSession, compact_sessions
from jinfercept.sim.public_traces import claude_code_session, lmcache_sessions, mooncake_sessions

AGENTS_TRACE = Path(__file__).with_name("agents.jsonl")
"""36 sessions of Claude Code with 6 sub-agents, anonymised, in the compact form: a sample of the traces of
callanjfox/kv-cache-tester, Apache-2.0."""

TraceForm = Literal["scripts", "compact", "claude", "mooncake", "lmcache"]

_KEYS: Mapping[TraceForm, frozenset[str]] = {
    "scripts": frozenset(("prompt", "segments")),
    "compact": frozenset(("calls",)),
    "claude": frozenset(("requests",)),
    "mooncake": frozenset(("input_length", "output_length", "hash_ids")),
    "lmcache": frozenset(("timestamp", "input", "output", "session_id")),
}


def trace_form(path: str | Path) -> TraceForm:
    """The form of a file by the keys of its first object; that of a folder of JSON files is "claude". A file that cannot be
    read, or whose first line is no object, is taken for scripts, whose reader says what is wrong.

    Raises:
        ConfigError: the keys are of no form.
    """
    if path == "paper":
        return "scripts"
    path = _place(path)
    if path.is_dir():
        return "claude"
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
            entry = json.loads(line if line.rstrip().endswith("}") else line + file.read())
    except (OSError, ValueError, RecursionError):
        return "scripts"
    if not isinstance(entry, dict) or "kind" in entry:
        return "scripts"
    for form, keys in _KEYS.items():
        if keys <= entry.keys():
            return form
    fix = "scripts, sessions in the compact form, or a trace of Claude Code, Mooncake or LMCache (docs/studies.md)"
    raise ConfigError(f"{path} is no trace that is read here", got=f"keys {', '.join(entry)}", fix=fix)


def load_sessions(path: str | Path) -> list[ScriptedSession]:
    """The sessions of a trace, each with its sub-agents, in the trace's order; `agents` is the trace that ships with the
    package.

    Raises:
        ConfigError: a file cannot be read, or has no sessions.
    """
    form, path = trace_form(path), _place(path)
    if form == "claude":
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        sessions = [claude_code_session(entry, str(file)) for file in files for entry in _objects(file)]
    else:
        reader = {"mooncake": mooncake_sessions, "lmcache": lmcache_sessions}.get(form, compact_sessions)
        sessions = reader(_objects(path), path)
    if not sessions:
        raise ConfigError("the trace has no sessions", got=path, fix="write one session a line")
    return sessions


def _place(path: str | Path) -> Path:
    return AGENTS_TRACE if path == "agents" else Path(path)


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file: one, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the trace cannot be read", got=f"{path} ({error})", fix="name a file of JSON") from None
    try:
        entries = {str(path): json.loads(text)}
    except (ValueError, RecursionError):
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        entries = {where: _parsed(line, where) for where, line in lines if line.strip()}
    for where, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: no object", got=f"{entry!r:.80}", fix="write JSON objects")
    return list(entries.values())


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON", got=error, fix="write one JSON object a line") from None
