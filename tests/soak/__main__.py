"""`python -m tests.soak`: its flags."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro import conf

from jinfercept.cli.command import run_command
from jinfercept.cli.options import Maybe, engine_flags, parse
from jinfercept.config import EngineOptions

PROG = "python -m tests.soak"
DESCRIPTION = "Random clients, hostile tools, disconnects, kills: nothing may be lost, hang, leak or be wrong."


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The command."""

    model: Annotated[conf.Positional[str | None], conf.arg(metavar="[MODEL]", help_behavior_hint="")] = None
    """as for `jinfercept serve` (default: a tiny random one)"""
    minutes: float = 10.0
    """of load; the checks come besides"""
    clients: int = 12
    """at a time"""
    patience: float = 60.0
    """seconds without a byte after which a request counts as hung"""
    seed: int = 0
    """of everything that clients do"""
    hostile: Annotated[int, conf.arg(metavar="CLIENTS")] = 0
    """hostile clients with a key of their own in the second half of the rounds, to see what they cost the others"""
    json: Maybe[str] = None
    """write everything to this file"""
    engine: Annotated[EngineOptions, engine_flags("seed")]

    def run(self) -> int:
        """Run the soak; returns the exit status."""
        from tests.soak.command import soak_command

        return soak_command(
            self.model,
            self.engine,
            minutes=self.minutes,
            clients=self.clients,
            patience_s=self.patience,
            seed=self.seed,
            hostile=self.hostile,
            json_path=self.json,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status, as `jinfercept` does."""
    return run_command(parse(Soak, PROG, DESCRIPTION, sys.argv[1:] if argv is None else argv), PROG)


if __name__ == "__main__":
    sys.exit(main())
