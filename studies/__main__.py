"""`python -m studies NAME`: the list of the studies."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from jinfercept.cli.command import HELP, HELP_ALL, Entry, run_command_line

PROG = "python -m studies"
NEEDED = ("matplotlib", "pandas", "tabulate")
"""Packages of the extra `studies`."""
COMMANDS: Mapping[str, Entry] = {
    "paper": Entry("studies.paper.command:Paper", "InferCept's latency by load, its waste and its ablation, simulated"),
    "calls": Entry(
        "studies.calls.command:StudyCalls",
        "asynchronous calls beside synchronous and parallel ones: latency, memory, and the formulas",
    ),
    "agents": Entry(
        "studies.agents.command:StudyAgents",
        "turns of coding agents under policies and published rivals, over pools, models and seeds",
    ),
    "regimes": Entry(
        "studies.agents.regimes:StudyRegimes",
        "two policies under the same order, over kinds of workloads, seed by seed",
    ),
    "overflow": Entry(
        "studies.overflow.command:StudyOverflow", "recompute or swap when running requests overflow the KV pool"
    ),
    "deciding": Entry(
        "studies.deciding.command:StudyDeciding",
        "where the choice of a policy matters, over machines, loads and clients that return",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; returns the exit status, as `jinfercept` does."""
    words = list(sys.argv[1:] if argv is None else argv)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing and words and not {*HELP, HELP_ALL} & {*words}:
        print(f"{PROG}: studies need {', '.join(missing)}: pip install '.[studies]'", file=sys.stderr)
        return 2
    return run_command_line(PROG, "What the simulator answers about pauses.", COMMANDS, words)


if __name__ == "__main__":
    sys.exit(main())
