"""Names that users of vLLM and transformers type. Those that need nothing here are accepted, others are refused with ours.

`vllm_names.toml` has them. Values are compared as text, so that a flag and a keyword argument mean the same.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinfercept.errors import ArgumentError, ConfigError, JinferceptError, NoSuchNameError, nearest

NAMES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def unneeded(row: Sequence[str], value: Any, got: str, error: type[JinferceptError] = ConfigError) -> str:
    """The reason why a flag or an argument needs nothing, from its `row` of `unneeded` or `calls`.

    A value of None is its default, or none. A value that asks for something raises `error`.
    """
    why, *accepted = row
    accepted = accepted or ["False", "True"]
    if value is None or accepted == ["*"] or str(value) in accepted:
        return why
    raise error(why, got=got[:80], fix=f"leave it out, or give {' or '.join(accepted)}")


def own_options(
    options: Mapping[str, Any], names: Collection[str], aliases: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of `LLM` by our names, without those that need nothing, and a line for the log for each of these.

    None stands for a default; `aliases` are other names. Raises `ConfigError` if an option asks for something that cannot be
    done, has another name here, or is given twice.
    """
    own, notes = dict[str, Any](), list[str]()
    for option, value in options.items():
        name, flag = aliases.get(option, option), f"--{option.replace('_', '-')}"
        if name in names:
            if name in own and value is not None:
                raise ConfigError("an option is given by two names", got=option, fix=f"give {name} alone")
            if name == "dtype" and not isinstance(value, str | None):
                value = getattr(value, "__name__", str(value)).removeprefix("torch.")
            ours = own_value(f"--{name.replace('_', '-')}", value)
            if ours is not value:
                notes.append(f"{option}={value!r} is {name}={ours!r} here")
            own |= {} if ours is None else {name: ours}
        elif flag in NAMES["renamed"]:
            fix = _keywords(NAMES["renamed"][flag])
            raise ConfigError("this option has another name in jinfercept", got=option, fix=fix)
        elif flag in NAMES["unneeded"]:
            why = unneeded([*map(_keywords, NAMES["unneeded"][flag])], value, f"{option}={value!r}")
            notes.append(f"{option} is not needed: {why}")
        else:
            own[option] = value
    return own, notes


def own_value(flag: str, value: Any) -> Any:
    """The value here of a flag that vLLM has too."""
    return NAMES["values"].get(flag, {}).get(value, value) if isinstance(value, str) else value


def check_arguments(what: str, arguments: Mapping[str, Any], names: Iterable[str], sampling: Iterable[str]) -> None:
    """Raise `ArgumentError`, which begins with `what`, for an unknown keyword argument of `generate` or `chat` that asks for
    something."""
    for name, value in arguments.items():
        if (row := NAMES["calls"].get(name)) is not None:
            unneeded(row, value, f"{name}={value!r}", ArgumentError)
        elif name not in names:
            fixes = {ours: f"SamplingParams({ours}=…)" for ours in sampling} | NAMES["renamed_calls"]
            fixes |= {theirs: f"in SamplingParams: {fix}" for theirs, fix in NAMES["renamed_sampling"].items()}
            raise no_such(ArgumentError, what, name, [*names], fixes)


def no_such[E: JinferceptError](
    error: type[E], what: str, name: str, names: Sequence[str], fixes: Mapping[str, str]
) -> E:
    """The error for a name that does not exist, with the name that does the same, or all names."""
    hint = "" if name in fixes else nearest(name, names)
    return error(what, got=name + hint, fix=fixes.get(name, f"one of {', '.join(sorted(names))}"))


def no_such_attribute(name: str, names: Sequence[str]) -> NoSuchNameError:
    """The error for an attribute that an `LLM` does not have."""
    public = [own for own in names if not own.startswith("_")]
    return no_such(NoSuchNameError, "an LLM has no such attribute", name, public, NAMES["attributes"])


def _keywords(text: str) -> str:
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)
