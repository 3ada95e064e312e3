"""What several commands have in common: the engine's flags, generated from `config.py`."""

import argparse
from collections.abc import Sequence
from typing import Any

from jinfercept.config import flag_fields

Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"

MODEL_HELP = "smollm2-135m, a Hugging Face directory or hub id, or a .gguf file"


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """The options of `LLM` but those `without`; those that are not given keep the defaults of `config.py`."""
    group = parser.add_argument_group("engine")
    for field, kind in flag_fields():
        if field.name in without:
            continue
        name = "--" + field.name.replace("_", "-")
        default = "" if field.default is None else f" (default: {field.default})"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"] + default}
        if kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(name, type=kind, choices=field.metadata["choices"] or None, **common)
