"""The `jinfercept` command: the list of its commands."""

import shlex
import sys
from collections.abc import Mapping, Sequence

from jinfercept.cli.command import Entry, run_command_line

PROG = "jinfercept"
DESCRIPTION = """\
A JAX serving engine for language models that call out while they write.
Studies of it run from a clone of its repository: python -m studies."""
COMMANDS: Mapping[str, Entry] = {
    "demo": Entry("jinfercept.cli.demo:Demo", "SmolLM2 answers word problems with tools, under every policy"),
    "run": Entry("jinfercept.cli.run:RunModel", "generate from a prompt, or chat, with tools if you like"),
    "serve": Entry(
        "jinfercept.cli.serve:Serve",
        "answer OpenAI's clients over HTTP",
        vllm_flags=True,
        usual="jinfercept.cli.serve:UsualFlags",
    ),
    "deploy": Entry("jinfercept.cli.deploy:Deploy", "answer OpenAI's clients with replicas on a Ray cluster"),
    "info": Entry("jinfercept.cli.info:Info", "shape of a model, and the memory that it needs"),
    "convert": Entry("jinfercept.cli.convert:Convert", "write a model so that it loads quickly (Orbax)"),
    "profile": Entry("jinfercept.cli.profile:MeasureProfile", "measure what steps and transfers cost on this machine"),
    "simulate": Entry(
        "jinfercept.cli.simulate:Simulate", "play a workload against the scheduler under a virtual clock"
    ),
    "bench replay": Entry(
        "jinfercept.cli.replay:Replay", "play a workload in real time against the real engine, with scripted calls"
    ),
    "bench throughput": Entry(
        "jinfercept.cli.throughput:Throughput",
        "decode and prefill tokens per second by batch and context, beside other engines",
    ),
    "bench sessions": Entry(
        "jinfercept.cli.sessions:Sessions", "sessions that take turns: time of a turn, and tokens that are recomputed"
    ),
}

STUDIES: Mapping[tuple[str, ...], Sequence[str]] = {
    ("study",): (),
    ("bench", "paper"): ("paper",),
}
"""Commands that `python -m studies` runs from a clone, by the words that named them here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as `run_command_line`. Without `argv` a server ends the process itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for words, name in STUDIES.items():
        if arguments[: len(words)] == [*words]:
            command = shlex.join(["python", "-m", "studies", *name, *arguments[len(words) :]])
            print(
                f"{PROG}: studies run from a clone of the repository, with its extra [studies]: {command}",
                file=sys.stderr,
            )
            return 2
    status = run_command_line(PROG, DESCRIPTION, COMMANDS, arguments)
    if argv is None and status == 0 and "serve" in arguments[:1]:
        from jinfercept.server.exit_limit import end_process

        end_process()
    return status


if __name__ == "__main__":
    sys.exit(main())
