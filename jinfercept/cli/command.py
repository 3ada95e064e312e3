"""A table of commands, each a dataclass in a module that is imported when its name is given. Imports nothing heavy."""

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from jinfercept.errors import ConfigError, EngineError, JinferceptError, nearest
from jinfercept.version import __version__
from jinfercept.vllm_names import NAMES, own_value, unneeded

HELP, HELP_ALL = ("-h", "--help"), "--help-all"


class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int:
        """Run the command and return the exit status. Raises `JinferceptError` for a user's mistake."""
        ...


class Entry(NamedTuple):
    """A command."""

    place: str  # of its dataclass, as `package.module:Name`
    help: str
    # flags of `vllm serve` that have no effect here are accepted; then the dataclass has a field `notes`
    vllm_flags: bool = False
    # place of a dataclass with the flags that `--help` shows; "": `--help` shows all, as `--help-all` does
    usual: str = ""

    def parse(self, prog: str, words: Sequence[str]) -> Command:
        """Parse the flags in `words`. Raises `SystemExit` as `jinfercept.cli.options.parse` does."""
        from jinfercept.cli.options import parse

        short = bool(self.usual) and not {*HELP}.isdisjoint(words)
        if HELP_ALL in words:
            words, short = ["--help"], False
        module, _, name = (self.usual if short else self.place).partition(":")
        command: type[Any] = getattr(import_module(module), name)
        if short or not self.vllm_flags:
            return parse(command, prog, self.help, words)
        try:
            words, notes = take_unneeded(words)
        except JinferceptError as error:
            raise refusal(prog, str(error)) from None
        return dataclasses.replace(parse(command, prog, self.help, words), notes=notes)


def run_command_line(prog: str, description: str, commands: Mapping[str, Entry], words: Sequence[str]) -> int:
    """Run the command that a command line names, and return the exit status of `run_command`.

    Args:
        words: the command line after `prog`.

    Raises:
        SystemExit: 2 for a mistake in the command line, with one line on standard error; 0 for `--help` of a command.
    """
    try:
        return _run_words(prog, description, commands, words)
    except BrokenPipeError:  # the reader of standard output is gone, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return 1


def _run_words(prog: str, description: str, commands: Mapping[str, Entry], words: Sequence[str]) -> int:
    if list(words) == ["--version"]:
        print(f"jinfercept {__version__}")
        return 0
    if not words or words[0] in HELP:
        print(_overview(prog, description, commands))
        return 0
    return run_command(parse_command_line(prog, commands, words), prog)


def parse_command_line(prog: str, commands: Mapping[str, Entry], words: Sequence[str]) -> Command:
    """Parse a command line into a command with its flags. Raises `SystemExit` as `run_command_line` does."""
    name = words[0]
    if name in commands:
        return commands[name].parse(f"{prog} {name}", words[1:])
    if name.startswith("-"):
        raise refusal(prog, f"a command comes before its flags; got {name}")
    raise refusal(prog, f"no such command: {name}{nearest(name, list(commands))}; one of {', '.join(commands)}")


def run_command(command: Command, prog: str = "jinfercept") -> int:
    """Run a command of the program `prog`, and return the exit status.

    The status is 2 for a user's mistake, 1 for an engine that failed, each with one line on standard error, and 130 after
    Ctrl-C.
    """
    try:
        return command.run()
    except JinferceptError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def refusal(prog: str, message: str) -> SystemExit:
    """Print a mistake in the command line to standard error, as one line. Returns exit status 2, to be raised."""
    print(f"{prog}: {message}; see {prog} --help", file=sys.stderr)
    return SystemExit(2)


def _overview(prog: str, description: str, commands: Mapping[str, Entry]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {entry.help}" for name, entry in commands.items()]
    usage = f"usage: {prog} [-h] [--version] COMMAND …"
    return "\n".join([usage, "", description, "", "commands:", *lines, "", f"{prog} COMMAND --help shows its flags."])


def take_unneeded(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Remove vLLM's flags that are not needed here. Returns the rest, and a line for the log for each removed flag.

    Raises `ConfigError` if a flag asks for something that cannot be done, or has another name here.
    """
    rest, notes = list[str](), list[str]()
    queue = deque(words)
    while queue:
        word = queue.popleft()
        if word == "--":
            rest += [word, *queue]
            break
        name, value = _split(word)
        if name in NAMES["renamed"]:
            raise ConfigError("this flag has another name in jinfercept", got=name, fix=NAMES["renamed"][name])
        row = NAMES["unneeded"].get(name)
        if row is None:
            rest.append(word)
            if name in NAMES["values"] and (value is not None or queue):
                value = queue.popleft() if value is None else value
                rest[-1:] = [name, ours := own_value(name, value)]
                notes += [f"{name} {value} is {name} {ours} here"] * (ours != value)
            continue
        if len(row) == 1:
            value = None
        elif value is None:
            value = queue.popleft() if queue else ""
        notes.append(f"{name} is not needed: {unneeded(row, value, f'{name} {value}')}")
    return rest, tuple(dict.fromkeys(notes))


def _split(word: str) -> tuple[str, str | None]:
    # the value may be written with the flag, as in `--task=generate`, `-tp=1` and `-O3`
    name, separator, value = word.partition("=")
    if word.startswith("-O") and name != "-O":
        name, separator, value = "-O", "=", word[2:]
    return NAMES["short"].get(name, name), value if separator else None
