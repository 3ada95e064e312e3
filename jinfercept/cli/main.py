"""The `jinfercept` command: the list of its commands."""

import sys
from collections.abc import Mapping, Sequence

from jinfercept.cli.command import Entry, run_command_line

PROG = "jinfercept"
DESCRIPTION = """\
A JAX serving engine for language models that call out while they write.
Measurements and studies of it run from a clone of its repository: python -m benchmarks, python -m studies."""
COMMANDS: Mapping[str, Entry] = {
    "demo": Entry("jinfercept.cli.demo:Demo", "SmolLM2 answers word problems with tools, under every policy"),
    "run": Entry("jinfercept.cli.run:RunModel", "generate from a prompt, or chat, with tools if you like"),
    "serve": Entry(
        "jinfercept.cli.serve:Serve",
        "answer OpenAI's clients over HTTP",
        vllm_flags=True,
        usual="jinfercept.cli.serve:UsualFlags",
    ),
    "info": Entry("jinfercept.cli.info:Info", "shape of a model, and the memory that it needs"),
    "convert": Entry("jinfercept.cli.info:Convert", "write a model so that it loads quickly"),
    "profile": Entry("jinfercept.cli.info:MeasureProfile", "measure what steps and transfers cost on this machine"),
    "simulate": Entry(
        "jinfercept.cli.simulate:Simulate", "play a workload against the scheduler under a virtual clock"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of `run_command_line`. Without `argv`, a server ends the process itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = run_command_line(PROG, DESCRIPTION, COMMANDS, arguments)
    if argv is None and status == 0 and "serve" in arguments[:1]:
        from jinfercept.serve.process import end_process

        end_process()
    return status


if __name__ == "__main__":
    sys.exit(main())
