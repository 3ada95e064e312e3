"""Flags of `vllm serve` that need nothing here: they are accepted, and the log says why nothing has to be done.

A value that asks for something which cannot be done is refused. Flags that have another name here are refused with that name.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jinfercept.errors import ConfigError


class Flag(NamedTuple):
    """A flag that needs nothing.

    Attributes:
        why: nothing has to be done.
        values: those that are accepted; empty: any value; None: the flag takes no value.
        short: its short form.
    """

    why: str
    values: tuple[str, ...] | None = None
    short: str | None = None


_COMPILED = "everything is compiled at the start, and nothing afterwards"

UNNEEDED = {
    "--enable-auto-tool-choice": Flag("tools are called wherever the model's template knows them"),
    "--enable-prompt-tokens-details": Flag("usage always has them"),
    "--enable-request-id-headers": Flag("every answer has its x-request-id"),
    "--enforce-eager": Flag(_COMPILED),
    "--compilation-config": Flag(_COMPILED, (), "-O"),
    "--async-scheduling": Flag("--pipeline-depth 1 is the default"),
    "--trust-remote-code": Flag("code from a model's repository is never run"),
    "--disable-log-requests": Flag("the text of requests is never logged"),
    "--no-enable-log-requests": Flag("the text of requests is never logged"),
    "--disable-log-stats": Flag("statistics are not logged; /metrics has them"),
    "--disable-uvicorn-access-log": Flag("a line for each request is all that is logged"),
    "--max-log-len": Flag("the text of requests is never logged", ()),
    "--uvicorn-log-level": Flag("the log has one level", ()),
    "--disable-frontend-multiprocessing": Flag("a server is one process"),
    "--api-server-count": Flag("a server is one process", ("1",)),
    "--pipeline-parallel-size": Flag("every device has all layers", ("1",), "-pp"),
    "--data-parallel-size": Flag("a server is one replica", ("1",), "-dp"),
    "--distributed-executor-backend": Flag("one process drives all its devices", ("mp", "uni")),
    "--cpu-offload-gb": Flag("weights stay on the device", ("0", "0.0")),
    "--tokenizer-mode": Flag("the tokenizer is the model's", ("auto",)),
    "--config-format": Flag("the format is seen from the files", ("auto", "hf")),
    "--runner": Flag("a server generates", ("auto", "generate")),
    "--task": Flag("a server generates", ("auto", "generate")),
    "--convert": Flag("a server generates", ("auto", "none")),
    "--scheduling-policy": Flag("requests are served by priority, then by arrival", ("fcfs", "priority")),
    "--chat-template-content-format": Flag("the parts of a text are joined", ("auto", "string")),
    "--response-role": Flag("answers are the assistant's", ("assistant",)),
}
"""The flags by name."""

RENAMED = {
    "--num-gpu-blocks-override": "--kv-tokens, in tokens",
    "--kv-offloading-size": "--swap-space",
    "--revision": "part of the model's name: owner/name@revision",
    "--tool-server": "--tools",
}
"""Refused flags, and their names here."""


_SHORT = {flag.short: name for name, flag in UNNEEDED.items() if flag.short is not None}


def take_unneeded(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command line without these flags, and for each of them a line for the log.

    Raises:
        ConfigError: a flag asks for something that cannot be done, or has another name here.
    """
    rest, notes = list[str](), list[str]()
    left = deque(words)
    while left:
        word = left.popleft()
        if word == "--":
            rest += [word, *left]
            break
        name, value = _split(word)
        if name in RENAMED:
            raise ConfigError("a flag has another name here", got=name, fix=RENAMED[name])
        flag = UNNEEDED.get(name)
        if flag is None:
            rest.append(word)
            continue
        if flag.values is not None:
            value = value if value is not None else left.popleft() if left else ""
            _check_value(name, flag, value)
        notes.append(f"{name} is not needed: {flag.why}")
    return rest, tuple(dict.fromkeys(notes))


def _split(word: str) -> tuple[str, str | None]:
    """A flag by its long name, and the value that is written with it, as in `--task=generate`, `-tp=1` and `-O3`."""
    name, separator, value = word.partition("=")
    if word.startswith("-O") and name != "-O":
        name, separator, value = "-O", "=", word[2:]
    return _SHORT.get(name, name), value if separator else None


def _check_value(name: str, flag: Flag, value: str) -> None:
    """Raise `ConfigError` if a value asks for something that is not done anyway."""
    if flag.values and value not in flag.values:
        raise ConfigError(flag.why, got=f"{name} {value}", fix=f"leave it out, or give {' or '.join(flag.values)}")
