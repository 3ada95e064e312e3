"""Throughput of other engines: commands that read the work as JSON on standard input and print their cells as JSON.

Each runs in a process of its own, one after another, while no `LLM` is alive.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinfercept.bench.throughput import Cell, ThroughputWork
from jinfercept.errors import ConfigError

PEERS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("torch", "transformers"),
    "vllm": ("vllm", "transformers"),
    "llama_cpp": ("llama_cpp", "numpy"),
}
"""Engines that a script in a clone's `benchmarks/peers` measures, and the packages that it needs."""


class Peer(NamedTuple):
    """Another engine: its name, and the command that measures it."""

    name: str
    command: tuple[str, ...]


class PeerCells(NamedTuple):
    """The cells of an engine in one dtype.

    Attributes:
        rest_gib, peak_gib: resident memory of its process, GiB, once it is ready and at most until its end; None: not known.
    """

    engine: str
    version: str
    dtype: str
    cells: list[Cell]
    rest_gib: float | None = None
    peak_gib: float | None = None


def script_peer(text: str) -> Peer:
    """An engine given as `NAME` or `NAME=PYTHON`: one of `PEERS`, in this interpreter or in that one.

    Raises:
        ConfigError: there is no such engine, this is no clone, or the interpreter lacks one of the engine's packages.
    """
    name, _, python = text.partition("=")
    if name not in PEERS:
        raise ConfigError("no such --peer", got=name, fix=f"use one of {', '.join(PEERS)}, or --peer-command")
    script, python = _script(name), python or sys.executable
    try:
        tried = subprocess.run([python, "-c", f"import {', '.join(PEERS[name])}"], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(
            f"the interpreter of --peer {name} cannot be run", got=f"{python} ({error.strerror})", fix="name a Python"
        ) from None
    if tried.returncode:
        raise ConfigError(
            f"the peer {name} cannot be imported",
            got=_last_line(tried.stderr),
            fix=f"give --peer {name}=PYTHON, an interpreter that has {' and '.join(PEERS[name])}",
        )
    return Peer(name, (python, str(script)))


def _script(name: str) -> Path:
    """The script that measures an engine. Raises `ConfigError` outside a clone."""
    for folder in (Path(), Path(__file__).parents[2]):
        if (script := folder / "benchmarks" / "peers" / f"throughput_{name}.py").is_file():
            return script.absolute()
    fix = "run it in the folder of a clone of the repository, or use --peer-command"
    raise ConfigError(f"--peer {name} needs its script", got=f"no {script}", fix=fix)


def command_peer(text: str) -> Peer:
    """An engine given as `NAME=COMMAND`. Raises `ConfigError` if it is none, or if there is no such program."""
    name, _, line = text.partition("=")
    try:
        command = tuple(shlex.split(line))
    except ValueError:
        command = ()
    if not name or not command:
        raise ConfigError("--peer-command is a name and a command", got=text, fix='give "NAME=COMMAND"')
    if shutil.which(command[0]) is None:
        raise ConfigError(f"the peer {name} cannot be found", got=command[0], fix="install it, or give its path")
    return Peer(name, command)


def measure_peer(peer: Peer, model: str, dtype: str, work: ThroughputWork, vocab_size: int) -> PeerCells:
    """Run a peer's command in one dtype.

    It reads `{"model", "dtype", "batches", "contexts", "new_tokens", "vocab_size"}` and its last line is
    `{"version": …, "cells": [{"batch", "context", "decode_tokens_per_s", "prefill_tokens_per_s"}, …]}`, with the
    process' `"rest_gib"` and `"peak_gib"` if it knows them.

    Raises:
        ConfigError: it failed, or printed something else.
    """
    order = {"model": model, "dtype": dtype, **work._asdict(), "vocab_size": vocab_size}
    process = subprocess.run(peer.command, input=json.dumps(order), capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(
            f"the peer {peer.name} failed in {dtype}",
            got=f"status {process.returncode}: {_last_line(process.stderr)}",
            fix=f"try {shlex.join(peer.command)} with {json.dumps(order)} on its standard input",
        )
    try:
        printed: dict[str, Any] = json.loads(_last_line(process.stdout))
        cells = [Cell(**cell) for cell in printed["cells"]]
        memory = (printed.get(name) for name in ("rest_gib", "peak_gib"))
        return PeerCells(peer.name, str(printed.get("version", "")), dtype, cells, *memory)
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"the peer {peer.name} printed no result",
            got=_last_line(process.stdout) or "nothing",
            fix=f'its last line is {{"version": …, "cells": [{{{", ".join(map(repr, Cell._fields))}}}, …]}}',
        ) from None


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1] if lines else ""
