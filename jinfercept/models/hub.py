"""Models by their id on the Hugging Face hub: downloads the needed files of a repository into the hub's own cache.

Does not read the model. Without a connection, the cached files are used.
"""

import re
from pathlib import Path

from jinfercept.errors import ModelError

_NOT_LOADED = ("*/*", "consolidated*", "model.*.safetensors")
"""Folders, Mistral's own format beside the converted one, and variants such as `model.fp16.safetensors`."""
_SETTINGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `owner/name` or `owner/name@revision`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", name) is not None


def fetch_repository(name: str, *, weights: bool) -> Path:
    """A directory with the repository's config and tokenizer, and with its weights if asked for.

    Torch's own files are only downloaded where there are no `.safetensors`.

    Raises:
        ModelError: the repository is not in the cache and cannot be downloaded.
    """
    directory = _download(name, (*_SETTINGS, "*.safetensors") if weights else _SETTINGS)
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
            got=f"{name}: {str(error).strip().splitlines()[0]}",
            fix="check the name and the connection (gated models: `hf auth login`), or download it elsewhere and give its path",
        ) from error
    return Path(directory)
