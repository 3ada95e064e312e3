"""Command lines from types: a command is a frozen dataclass whose fields `tyro` turns into flags.

The groups of `config.py` and `ServerOptions` become groups of flags. A flag that is not given has no value, so the defaults
stay where the options are declared.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import Field, fields
from io import StringIO
from typing import Annotated, Any, Required, TypedDict, get_origin, get_type_hints

from tyro import cli, conf

from jinfercept.cli.command import refusal
from jinfercept.config import GROUPS, EngineOptions, HostOptions, without_none
from jinfercept.errors import nearest

CONFIG = (conf.OmitArgPrefixes, conf.DisallowNone, conf.PositionalMetavarFromFieldName)
HOSTS = tuple(f.name for f in fields(HostOptions))
"""Options that a command of one process goes without."""
SEVERAL = "repeat it, or give several with commas"

type Maybe[T] = Annotated[T | None, conf.arg(help_behavior_hint="")]
"""A flag whose default is in its help text, if it has one."""
type Switch = Annotated[bool, conf.FlagCreatePairsOff, conf.arg(help_behavior_hint="")]
"""A flag without a `--no-` form."""
type Repeated = Annotated[tuple[str, ...], conf.UseAppendAction, conf.arg(help_behavior_hint="(may be repeated)")]
type Several = Annotated[tuple[str, ...], conf.UseAppendAction, conf.arg(help_behavior_hint=f"({SEVERAL})")]
"""A flag that may be repeated; each value may hold several with commas."""
type Files = Annotated[
    conf.Positional[tuple[str, ...]], conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(at least one)")
]
type ModelName = Annotated[
    conf.Positional[str],
    conf.arg(metavar="MODEL", help="smollm2-135m, a Hugging Face directory or hub id, or a .gguf file"),
]


def engine_flags(*without: str) -> Any:
    """Mark a field of type `EngineOptions`: flags for all options of the engine except `without`."""
    return _flags({name: _group(group, lambda option: option not in without) for name, group in GROUPS.items()})


def option_flags(*names: str) -> Any:
    """Mark a field of type `EngineOptions`: flags for only these options of the engine."""
    return _flags({name: _group(group, names.__contains__) for name, group in GROUPS.items()})


def group_flags(name: str, group: type, *names: str) -> Any:
    """Mark a field of type `Mapping[str, Any]`: flags for the options of one dataclass, or for only `names`."""
    return _flags({name: _group(group, lambda option: not names or option in names)})


def _flags(groups: dict[str, type]) -> Any:
    groups = {name: group for name, group in groups.items() if group.__annotations__}
    Groups: Any = TypedDict("Groups", groups)  # pyright: ignore[reportArgumentType] # made at run time

    def given(groups: Annotated[Groups, conf.arg(name="")]) -> EngineOptions:  # pyright: ignore[reportInvalidTypeForm]
        values = {name: value for group in groups.values() for name, value in group.items()}
        return {name: value for name, value in values.items() if value != ()}  # pyright: ignore[reportReturnType]

    return conf.arg(name="", constructor=given)


def _group(group: type, includes: Callable[[str], bool]) -> type:
    hints = get_type_hints(group)
    entries = {f.name: _entry(f, without_none(hints[f.name])) for f in fields(group) if includes(f.name)}
    return TypedDict(group.__name__, entries, total=False)  # pyright: ignore[reportArgumentType, reportReturnType]


def _entry(option: Field[Any], hint: Any) -> Any:
    shown = {None: "", (): "(may be repeated)"}.get(option.default, f"(default: {_shown(option.default)})")
    marker = conf.arg(help=option.metadata["help"], help_behavior_hint=shown, aliases=option.metadata["aliases"])
    if get_origin(hint) is tuple:
        return Required[Annotated[hint, conf.UseAppendAction, marker, conf.arg(default=())]]
    return Annotated[hint, marker]


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


_PLAINER = {
    r"Error parsing (\S+): .*invalid literal for int\(\) with base 10: (.*)": r"\1 takes a whole number; got \2",
    r"Error parsing (\S+): .*could not convert string to float: (.*)": r"\1 takes a number; got \2",
    r"Missing from [^:]*: ([A-Z]+) (.*) \(required\)": r"\1 is missing: \2",
}
"""Patterns of `tyro`'s messages, and what is printed in their place."""

# -- parsing -----------------------------------------------------------------------------------------------------------


def parse[C](command: type[C], prog: str, description: str, words: Sequence[str]) -> C:
    """Parse a command line into a command.

    Args:
        prog: the program and command name before `words`.
        description: shown by `--help`.

    Raises:
        SystemExit: 0 for `--help`, which is printed; 2 for a mistake, which is one line on standard error.
    """
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            parsed, unknown = cli(
                command, prog=prog, description=description, args=words, return_unknown_args=True, config=CONFIG
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise refusal(prog, _one_line(errors.getvalue())) from None
    if wrong := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        flags = _flags_of(command, prog)
        raise refusal(prog, "no such flag: " + ", ".join(flag + nearest(flag, flags) for flag in wrong))
    if unknown:
        prompt = "; a prompt is given as --prompt TEXT" if "prompt" in command.__annotations__ else ""
        raise refusal(prog, f"one argument too many: {' '.join(unknown)}{prompt}")
    return parsed


def _flags_of(command: type, prog: str) -> list[str]:
    shown = StringIO()
    try:
        with redirect_stdout(shown):
            cli(command, prog=prog, args=["--help"], config=CONFIG)
    except SystemExit:
        pass
    return re.findall(r"--[a-z][\w-]*", shown.getvalue())


def _one_line(drawn: str) -> str:
    plain = re.sub(r"\x1b\[[\d;]*m", "", drawn)
    lines = [line.strip("│ ") for line in plain.splitlines()][1:]
    # `tyro` draws a title, then parts with rules between them, in a box or without; the first part says what is wrong
    parts = [list[str]()]
    for line in lines:
        if line.startswith(("──", "--", "╰")) and not line.strip("─-╰╯"):
            parts.append([])
        else:
            parts[-1].append(line)
    message = next((" ".join(part).rstrip(".! ") for part in parts if part), "wrong flags")
    for pattern, plainer in _PLAINER.items():
        message = re.sub(pattern, plainer, message)
    return message
