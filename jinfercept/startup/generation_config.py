"""Sampling defaults from a checkpoint's `generation_config.json`, as vLLM reads it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinfercept.errors import ConfigError, ModelError, RequestError, shown
from jinfercept.sampling_params import SamplingParams

FILE = "generation_config.json"
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file that are read, and their names in `SamplingParams`."""


def sampling_defaults(option: str, source: Path | None) -> Mapping[str, Any]:
    """Fields of `SamplingParams` whose defaults come from a `generation_config.json`; empty where there is none.

    Args:
        option: `auto`: the checkpoint's file, if it has one; `vllm`: no file; else a directory that has one.
        source: the directory or the file of the checkpoint; None if the weights come from elsewhere.

    Raises:
        ConfigError: the directory has no such file.
        ModelError: the file is no JSON object, or one of its values cannot be used.
    """
    if option == "vllm":
        return {}
    if option != "auto":
        path = Path(option).expanduser() / FILE
        if not path.is_file():
            raise ConfigError(
                "generation_config must be auto, vllm or a directory with a generation_config.json",
                got=option,
                fix="give one of them",
            )
    elif source is None or not (path := source / FILE).is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{FILE} cannot be read", got=error, fix="correct it, or use generation_config=vllm"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{FILE} is a JSON object", got=shown(config), fix="use the original file")
    defaults = {ours: config[name] for name, ours in NAMES.items() if config.get(name) is not None}
    try:
        replace(SamplingParams(), **defaults)
    except RequestError as error:
        raise ModelError(
            f"{FILE} has a sampling parameter that cannot be used",
            got=error,
            fix="correct it, or use generation_config=vllm",
        ) from error
    return defaults
