"""What several commands have in common: the engine's flags, generated from `config.py`."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import Field
from typing import Any, final

from jinfercept.config import flag_fields
from jinfercept.errors import nearest


@final
class Parser(argparse.ArgumentParser):
    """Names the nearest flag when one is not known. Parsers of its commands are of the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As that of `argparse`, which calls it for every command with what comes behind its name."""
        parsed, rest = super().parse_known_args(args, namespace)
        wrong = [flag.partition("=")[0] for flag in rest if flag.startswith("--")]
        if wrong:
            known = list(self._option_string_actions)
            self.error("no such flag: " + ", ".join(flag + nearest(flag, known) for flag in wrong))
        return parsed, rest


type Commands = argparse._SubParsersAction[Parser]  # pyright: ignore[reportPrivateUsage] # it has no public name
"""What `add_subparsers` gives: commands are added to it."""

MODEL_HELP = "smollm2-135m, a Hugging Face directory or hub id, or a .gguf file"


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """The options of `LLM` but those `without`; those that are not given keep the defaults of `config.py`."""
    wanted = [(field, kind) for field, kind in flag_fields() if field.name not in without]
    add_fields(parser.add_argument_group("engine"), wanted)


def add_fields(group: Any, options: Iterable[tuple[Field[Any], type]]) -> None:
    """Options with their types as flags; one whose type is a tuple may be repeated. What is not given is not there.

    Args:
        group: of a parser, or a parser.
    """
    for field, kind in options:
        name = "--" + field.name.replace("_", "-")
        default = "" if field.default in (None, ()) else f" (default: {_shown(field.default)})"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"] + default}
        if kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        elif kind is tuple:
            group.add_argument(name, action="append", **common)
        else:
            group.add_argument(name, type=kind, choices=field.metadata["choices"] or None, **common)


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
