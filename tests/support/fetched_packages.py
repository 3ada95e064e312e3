"""Packages of clients that tests fetch into the directory of downloads, beside the environment of the project."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
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


def python_packages(*packages: str) -> Path:
    """A folder for `PYTHONPATH`, with these packages and what they need. Skips the test if pip cannot fetch them."""
    return _fetched(packages, [sys.executable, "-m", "pip", "install", "--quiet", "--target"])


def npm_packages(*packages: str) -> Path:
    """A folder with `node_modules`. Skips the test if npm cannot fetch the packages."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("npm is not installed")
    return _fetched(packages, [npm, "install", "--foreground-scripts", "--prefix"])


def _fetched(packages: Sequence[str], install: Sequence[str]) -> Path:
    folder = cache_directory() / "clients" / "+".join(packages).replace("/", "_")
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    done = subprocess.run([*install, partial, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be fetched: {done.stderr[-200:]}")
    partial.rename(folder)
    return folder
