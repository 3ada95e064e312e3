"""`python -m examples.tool_adapter COMMAND`: trains an adapter with which a small model calls tools."""

import sys
from collections.abc import Mapping

from jinfercept.cli.command import Entry, run_command_line

COMMANDS: Mapping[str, Entry] = {
    "train": Entry("examples.tool_adapter.train:Train", "learn an adapter from dialogues about invented tools"),
    "score": Entry("examples.tool_adapter.score:Score", "a model's calls of functions that it has never seen"),
}

if __name__ == "__main__":
    sys.exit(run_command_line("python -m examples.tool_adapter", __doc__ or "", COMMANDS, sys.argv[1:]))
