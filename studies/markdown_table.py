"""Data frames as tables in Markdown. pandas is imported where a table is made: command lines are parsed without it."""

import re
from typing import TYPE_CHECKING

from jinfercept.sim.tables import TextTable

if TYPE_CHECKING:
    from pandas import DataFrame


def markdown_table(frame: "DataFrame", *, index: bool = False) -> str:
    """A table of texts, aligned to the right, without padding; `index`: the frame's index is the first column."""
    padded = frame.to_markdown(index=index, disable_numparse=True, stralign="right")
    return re.sub("-{3,}:", "---:", re.sub(" {2,}", " ", padded))


def titled_table(table: TextTable) -> str:
    """A table under its title."""
    from pandas import DataFrame

    return f"{table.title}\n\n{markdown_table(DataFrame(table.rows, columns=list(table.columns)))}"
