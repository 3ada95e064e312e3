"""Commands in files of `deploy/`, read by the parser of the command line."""

from collections.abc import Sequence

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from jinfercept.cli.serve import Serve
from jinfercept.config import EngineConfig
from jinfercept.server.options import ServerOptions


def check_serve(words: Sequence[str]) -> tuple[ServerOptions, EngineConfig]:
    """Options of a `jinfercept serve` command. Raises for flags that do not exist and values that are wrong.

    Args:
        words: of the command, `serve` first.
    """
    command = parse_command_line(PROG, COMMANDS, words)
    assert isinstance(command, Serve)
    return command.options(), EngineConfig.from_options(command.engine)
