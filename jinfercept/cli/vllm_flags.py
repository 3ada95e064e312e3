"""A command line of `vllm serve`: flags that need nothing are taken out, and the log says why nothing has to be done."""

from collections import deque
from collections.abc import Sequence

from jinfercept.errors import ConfigError
from jinfercept.values.vllm_names import RENAMED, UNNEEDED, VALUES, Flag, own_value

_SHORT = {flag.short: name for name, flag in UNNEEDED.items() if flag.short is not None} | {"-q": "--quantization"}


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
            if name in VALUES and (value is not None or left):
                value = left.popleft() if value is None else value
                rest[-1:] = [name, ours := own_value(name, value)]
                notes += [f"{name} {value} is {name} {ours} here"] * (ours != value)
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
