"""`python -m tests.soak`: its flags."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jinfercept.cli.flags import MODEL_HELP, Parser, add_flags
from jinfercept.cli.main import run_command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status, as `jinfercept` does."""
    return run_command_line(build_parser(), argv)


def build_parser() -> argparse.ArgumentParser:
    """The flags of a soak."""
    soak = Parser(
        prog="python -m tests.soak",
        description="Random clients, hostile tools, disconnects, kills: nothing may be lost, hang, leak or be wrong.",
    )
    soak.add_argument("model", nargs="?", help=f"{MODEL_HELP} (default: a tiny random one)")
    soak.add_argument("--minutes", type=float, default=10.0, help="of load; the checks come besides (default: 10)")
    soak.add_argument("--clients", type=int, default=12, help="at a time (default: 12)")
    soak.add_argument(
        "--patience",
        type=float,
        default=60.0,
        dest="patience_s",
        help="seconds without a byte after which a request counts as hung (default: 60)",
    )
    soak.add_argument("--seed", type=int, default=0, help="of everything that clients do (default: 0)")
    soak.add_argument(
        "--hostile",
        type=int,
        default=0,
        metavar="CLIENTS",
        help="hostile clients with a key of their own in the second half of the rounds: what they do to the others' "
        "first tokens, and to the server's memory (default: 0)",
    )
    soak.add_argument("--json", help="write everything to this file")
    add_flags(soak, without=("seed",))
    soak.set_defaults(command_function=_soak)
    return soak


def _soak(
    model: str | None,
    minutes: float,
    clients: int,
    patience_s: float,
    seed: int,
    hostile: int,
    json: str | None,
    **flags: Any,
) -> int:
    from tests.soak.command import soak_command

    return soak_command(
        model,
        flags,
        minutes=minutes,
        clients=clients,
        patience_s=patience_s,
        seed=seed,
        hostile=hostile,
        json_path=json,
    )


if __name__ == "__main__":
    sys.exit(main())
