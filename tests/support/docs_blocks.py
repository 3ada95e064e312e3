"""The code blocks of a documentation page, and what the page's source says of each to whoever tests it.

Comments before a block say how it is read: `<!-- not run: REASON -->`, `<!-- only with a scripted model: REASON -->`,
`<!-- needs a package: NAME -->`, and `<!-- the model writes: … -->` with a line for each time that it speaks. A `text` block
is what the block before it prints.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(r"<!--(?P<comment>.*?)-->|^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?:# |\{# )([\w.]+\.(?:py|toml|jinja))(?: #\})?\n")
NOT_RUN, SCRIPTED = "not run:", "only with a scripted model:"
PACKAGE, WRITES = "needs a package:", "the model writes:"


@dataclass(frozen=True, slots=True)
class Block:
    """One of them.

    Attributes:
        place: page and line.
        language: behind the fence.
        writes: what the model says, turn by turn.
        not_run: why it cannot be run in a test; None if it can.
        only_scripted: why it cannot be run with a real model; None if it can.
        package: that it imports and the tests do not install.
        file: by which name it is written to the working folder; None if it is no file.
        prints: what it prints; None if nobody says.
    """

    place: str
    language: str
    code: str
    writes: tuple[str, ...] = ()
    not_run: str | None = None
    only_scripted: str | None = None
    package: str | None = None
    file: str | None = None
    prints: str | None = None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order. Raises `AssertionError` for a comment that means nothing or has no reason."""
    source = (DOCS / page).read_text(encoding="utf-8")
    blocks: list[Block] = []
    told: dict[str, str] = {}
    for part in _PART.finditer(source):
        place = f"{page}:{source.count(chr(10), 0, part.start()) + 1}"
        if part["comment"] is not None:
            [kind] = [kind for kind in (NOT_RUN, SCRIPTED, PACKAGE, WRITES) if part["comment"].strip().startswith(kind)]
            told[kind] = part["comment"].strip().removeprefix(kind).strip()
            assert told[kind], f"{place} gives no reason"
        elif part["language"] == "text" and blocks and not told:
            blocks.append(replace(blocks.pop(), prints=part["code"]))
        else:
            blocks.append(_block(place, part["language"], part["code"], told))
            told = {}
    assert not told, f"{page} ends with a comment about no block"
    return blocks


def _block(place: str, language: str, code: str, told: dict[str, str]) -> Block:
    named = _FILE.match(code)
    writes = tuple(line.strip() for line in told.get(WRITES, "").splitlines() if line.strip())
    file = named[1] if named else None
    return Block(place, language, code, writes, told.get(NOT_RUN), told.get(SCRIPTED), told.get(PACKAGE), file)
