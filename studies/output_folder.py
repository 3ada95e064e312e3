"""The folder that a study writes its pages and pictures to. Imports no JAX."""

from collections.abc import Iterable
from pathlib import Path

from jinfercept.errors import ConfigError
from jinfercept.sim.plots import check_drawing
from jinfercept.sim.reports import check_outputs


def output_folder(out: str, names: Iterable[str]) -> Path:
    """The folder of `--out`, made if it does not exist, before the work that fills it.

    Args:
        out: its path.
        names: of the files that will be written into it, pictures among them.

    Raises:
        ConfigError: it cannot be made, a file cannot be written into it, or pictures need a package that is missing.
    """
    if not out:
        raise ConfigError("--out names no folder", got="an empty text", fix="name a folder")
    folder = Path(out)
    check_drawing(folder / "any.png")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out cannot be made", got=f"{folder} ({error})", fix="name a folder") from None
    check_outputs(("--out", folder / name) for name in names)
    return folder
