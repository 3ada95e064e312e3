"""The files in a model's directory: they are regular files, and the JSON among them is whole."""

import json
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from jinfercept.errors import ModelError

_MAX_JSON_BYTES = 64 << 20  # an index of a hundred thousand tensors has 10 MB
_OPENED = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".gguf")


def read_json(file: Path) -> Any:
    """The value of a JSON file. Raises `ModelError` for a damaged or an absurdly large one."""
    try:
        if (size := file.stat().st_size) > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file.name} is not valid JSON", got=str(error)[:200], fix="download it again") from error


def check_model_directory(directory: Path) -> None:
    """Raise `ModelError` for a pipe, a socket, a device, a directory or a dead link where a model has a file.

    Opening one may wait for ever. Names that no file of a model has are not looked at.
    """
    try:
        files = [path for path in directory.iterdir() if path.suffix in _OPENED]
    except OSError as error:
        raise ModelError(
            "the model's directory cannot be read", got=str(error)[:300], fix="name another one"
        ) from error
    for path in files:
        check_regular(path)


def check_regular(path: Path) -> None:
    """Raise `ModelError` unless this is a file that can be read without waiting."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ModelError(
            "a file of the model cannot be read", got=str(error)[:300], fix="put it there again"
        ) from error
    if not S_ISREG(mode):
        kind = "a directory" if S_ISDIR(mode) else "a pipe, a socket or a device"
        raise ModelError("this is not a regular file", got=f"{path.name[:200]} is {kind}", fix="put the file there")
