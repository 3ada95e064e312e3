"""Whether pictures can be drawn: matplotlib is an extra, and is imported where something is drawn."""

import importlib.util
from pathlib import Path

from jinfercept.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
"""Suffixes of plot files."""


def check_drawing(path: str | Path) -> None:
    """Raise `ConfigError` if matplotlib is not installed, or if there is no picture by such a name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", got="no such package", fix="pip install 'jinfercept[plots]'")
    if Path(path).suffix not in FORMATS:
        raise ConfigError("unknown kind of picture", got=path, fix=f"end it with {', '.join(FORMATS)}")
