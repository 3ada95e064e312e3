"""`python -m examples.async_calls COMMAND`: trains a model that calls tools asynchronously, and evaluates one."""

import sys
from collections.abc import Mapping

from jinfercept.cli.command import Entry, run_command_line

COMMANDS: Mapping[str, Entry] = {
    "train": Entry("examples.async_calls.train:Train", "train a small Llama from nothing, or fine-tune a checkpoint"),
    "demo": Entry(
        "examples.async_calls.demo:Demo", "calls that run while the model writes, beside calls that it waits for"
    ),
    "evaluate": Entry("examples.async_calls.evaluate:Evaluate", "held-out dialogues, asynchronous against synchronous"),
}

if __name__ == "__main__":
    sys.exit(run_command_line("python -m examples.async_calls", __doc__ or "", COMMANDS, sys.argv[1:]))
