"""The source package of llama-cpp-python, in which chat templates and vocabularies of published models are."""

import subprocess
import sys
from pathlib import Path

import pytest

from jinfercept.models.embedded import cache_directory

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"


def published_package() -> Path:
    """The package, which pip downloads into the folder of downloads; skips the test where it cannot."""
    folder = cache_directory() / "templates"
    file = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not file.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        try:
            subprocess.run([*pip, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{PACKAGE} {VERSION} cannot be downloaded: {error}")
    return file
