"""`python -m examples.grpo_tools COMMAND`: a model learns to call tools by their results (GRPO)."""

import sys
from collections.abc import Mapping

from jinfercept.cli.command import Entry, run_command_line

COMMANDS: Mapping[str, Entry] = {
    "train": Entry("examples.grpo_tools.train:Train", "an adapter learns from rewards, one version behind"),
    "compare": Entry("examples.grpo_tools.compare:Compare", "rollouts per second beside loops that drop contexts"),
}

if __name__ == "__main__":
    sys.exit(run_command_line("python -m examples.grpo_tools", __doc__ or "", COMMANDS, sys.argv[1:]))
