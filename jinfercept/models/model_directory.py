"""A model's files: regular ones in its directory, the JSON among them whole, or a repository of the Hugging Face hub."""

import json
import re
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
    """Raise `ModelError` for a pipe, a socket, a device, a directory or a dead link with a name like that of a model's file:
    opening one may wait for ever."""
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


_NOT_LOADED = ("*/*", "consolidated*", "model.*.safetensors")
"""Folders, Mistral's own format beside the converted one, and variants such as `model.fp16.safetensors`."""
_SETTINGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `owner/name` or `owner/name@revision`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", name) is not None


def fetch_repository(name: str, *, weights: bool) -> Path:
    """The directory of a repository in the hub's own cache, with its config and tokenizer, and its weights if asked for. Needed
    files are downloaded; without a connection, the cached ones are used. Raises `ModelError` if there are none."""
    directory = _download(name, (*_SETTINGS, "*.safetensors") if weights else _SETTINGS)
    # torch's own files only where there are no others
    if weights and not any(directory.glob("*.safetensors")):
        directory = _download(name, (*_SETTINGS, "pytorch_model*.bin"))
    return directory


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import

    repository, _, revision = name.partition("@")
    try:
        directory = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=list(_NOT_LOADED)
        )
    except Exception as error:  # of the connection, the hub, the file system
        raise ModelError(
            "there is no such directory, and the model cannot be downloaded from the Hugging Face hub",
            got=f"{name}: {str(error).strip().splitlines()[0].removeprefix('Got: ')}",
            fix="check the name and the connection (gated models: `hf auth login`), or download it elsewhere and give its path",
        ) from error
    return Path(directory)
