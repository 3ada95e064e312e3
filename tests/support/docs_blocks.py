"""The code blocks of a documentation page, and what the page's source says of each to whoever tests it.

Comments before a block say how it is read. `<!-- the model writes: … -->` has a line for each of its turns; a `text` block is
what the block before it prints.

    not run: NEEDS: MORE                 what no test has, one of `NEEDS`
    only with a scripted model: REASON   not with a real one
    only with a real model: REASON       in a process of its own, in a slow test
    continues the program above          has its names; all others run alone
    shorter: --flag value …              a command of minutes or hours: these replace its own flags, in a slow test
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(r"<!--(?P<comment>.*?)-->|^```(?P<language>[\w{}-]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?:# |\{# )([\w.]+\.(?:py|toml|jinja|yaml))(?: #\})?\n")
NOT_RUN, SCRIPTED, REAL = "not run:", "only with a scripted model:", "only with a real model:"
WRITES, CONTINUES, SHORTER = "the model writes:", "continues", "shorter:"
KINDS = (NOT_RUN, SCRIPTED, REAL, WRITES, CONTINUES, SHORTER)
NEEDS = (
    *("a GPU", "a TPU", "several machines", "a terminal", "packages from the network", "a model from the network"),
    *("another product", "your own objects", "a Ray cluster", "a full disk", "a crowd of clients"),
)
"""What a block may need that is not run."""
SHOWN = ("text", "yaml", "toml", "json", "jinja", "nginx", "{toctree}", "{eval-rst}")
"""Languages of blocks that are read, not run."""


@dataclass(frozen=True, slots=True)
class Block:
    """One of them.

    Attributes:
        place: page and line.
        language: behind the fence.
        writes: what the model says, turn by turn.
        not_run: what it needs that no test has; None if nothing.
        only_scripted: why it cannot be run with a real model; None if it can.
        only_real: why it cannot be run with a scripted model in the tests' process; None if it can.
        file: by which name it is written to the working folder; None if it is no file.
        prints: what it prints; None if the page does not say.
        continues: it uses the names of the program above.
        shorter: flags with which a test runs its commands; None: as they are.
    """

    place: str
    language: str
    code: str
    writes: tuple[str, ...] = ()
    not_run: str | None = None
    only_scripted: str | None = None
    only_real: str | None = None
    file: str | None = None
    prints: str | None = None
    continues: bool = False
    shorter: str | None = None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page of `docs`, in order. Raises `AssertionError` for a comment that means nothing or has no reason."""
    source = (DOCS / page).read_text(encoding="utf-8")
    blocks: list[Block] = []
    told: dict[str, str] = {}
    for part in _PART.finditer(source):
        place = f"{page}:{source.count(chr(10), 0, part.start()) + 1}"
        if part["comment"] is not None:
            [kind] = [kind for kind in KINDS if part["comment"].strip().startswith(kind)]
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
    block = Block(place, language, code, writes, told.get(NOT_RUN), told.get(SCRIPTED), told.get(REAL))
    return replace(block, file=file, continues=CONTINUES in told, shorter=told.get(SHORTER))
