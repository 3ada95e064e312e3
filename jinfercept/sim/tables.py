"""Tables at a terminal, and numbers in the texts of options."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jinfercept.errors import ConfigError


class TextTable(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def shown(self) -> Table:
        shown = plain_table(self.columns, title=self.title)
        for row in self.rows:
            shown.add_row(*row)
        return shown


def plain_table(
    columns: Sequence[str], *, left: Collection[str] = (), title: str | None = None, caption: str | None = None
) -> Table:
    """A table without lines, whose columns are numbers but for those on the left."""
    table = Table(title=title, title_justify="left", caption=caption, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def check_least(flag: str, value: float, least: float) -> None:
    """Raise `ConfigError` if an option is too small, or infinite."""
    if not least <= value < math.inf:
        problem = "infinite" if value > least else "too small"
        raise ConfigError(f"{flag} is {problem}", got=value, fix=f"at least {least}")


def listed(texts: Sequence[str]) -> list[str]:
    """The names in texts, separated by commas; each once."""
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))


def numbers[N: (int, float)](flag: str, texts: Sequence[str], kind: type[N]) -> list[N]:
    """The numbers in texts, separated by commas; each once, ascending. Raises `ConfigError` for a text that is no number."""
    try:
        return sorted({kind(text) for text in listed(texts)})
    except ValueError:
        fix = "whole numbers, as 0,1,2" if kind is int else "numbers, as 3.5,5"
        raise ConfigError(f"{flag} is not a number", got=", ".join(texts), fix=fix) from None


def number_text(value: float) -> str:
    """A number with about four digits; thousands as k and M."""
    for least, size, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 1000 else f"{value:.4g}"


def show(shown: Table) -> None:
    """Print a table; a terminal that is too narrow wraps its lines and cuts nothing."""
    console = Console()
    needed = console.measure(shown, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(shown)
