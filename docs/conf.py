"""Builds the documentation: `tools/docs`. The reference comes from docstrings, the command line's from its own parser."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import jinfercept
from jinfercept.cli.main import build_parser

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


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser's commands and theirs, as far as they do something themselves."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from commands_of(command)


def write_command_reference(path: Path) -> None:
    """The help of every command, one section each."""
    intro = "# Command line\n\nEvery command, as its `--help` prints it.\n"
    parsers = commands_of(build_parser())
    parts = [f"## `{parser.prog}`\n\n```text\n{parser.format_help().rstrip()}\n```\n" for parser in parsers]
    path.write_text("\n".join([intro, *parts]), encoding="utf-8")


write_command_reference(Path(__file__).parent / "commands.md")
