"""Builds the documentation: `tools/docs`. The reference comes from docstrings, the command line's from its own help."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import jinfercept
from jinfercept.cli import main as package

sys.path.insert(0, str(Path(__file__).parent.parent))
from studies import __main__ as studies

os.environ["COLUMNS"] = "110"  # of help texts

project = "jinfercept"
copyright = "the jinfercept authors, Apache-2.0"
release = version = jinfercept.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jinfercept"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"  # docstrings mark code with single backquotes
napoleon_use_ivar = True  # dataclasses describe their fields in the class's docstring


def help_of(main: Callable[[list[str]], int], command: str) -> str:
    """What a command prints for `--help-all`."""
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([*command.split(), "--help-all"])
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def write_command_reference(path: Path) -> None:
    """The help of every command, one section each."""
    intro = "# Command line\n\nEvery command, as its `--help-all` prints it. Studies (`python -m studies`) run from a clone.\n"
    parts = [
        f"## `{module.PROG} {command}`\n\n```text\n{help_of(module.main, command)}\n```\n"
        for module in (package, studies)
        for command in module.COMMANDS
    ]
    path.write_text("\n".join([intro, *parts]), encoding="utf-8")


write_command_reference(Path(__file__).parent / "commands.md")
