"""The `jinfercept` command: the list of its commands."""

import sys
from collections.abc import Mapping, Sequence

from jinfercept.cli.command import Entry, run_command_line

PROG = "jinfercept"
DESCRIPTION = "A JAX serving engine for language models that call out while they write."
COMMANDS: Mapping[str, Entry] = {
    "demo": Entry("jinfercept.cli.demo:Demo", "SmolLM2 answers word problems with tools, under every policy"),
    "run": Entry("jinfercept.cli.run:Run", "generate from a prompt, or chat, with tools if you like"),
    "serve": Entry("jinfercept.cli.serve:Serve", "answer OpenAI's clients over HTTP", vllm_flags=True),
    "deploy": Entry("jinfercept.cli.deploy:Deploy", "answer OpenAI's clients with replicas on a Ray cluster"),
    "info": Entry("jinfercept.cli.info:Info", "shape of a model, and the memory that it needs"),
    "convert": Entry("jinfercept.cli.convert:Convert", "write a model so that it loads quickly (Orbax)"),
    "profile": Entry("jinfercept.cli.profile:MeasureProfile", "measure what steps and transfers cost on this machine"),
    "simulate": Entry(
        "jinfercept.cli.simulate:Simulate", "play a workload against the scheduler under a virtual clock"
    ),
    "plan": Entry("jinfercept.cli.plan:PlanFleet", "how many replicas of which kind serve a load within its limits"),
    "bench estimators": Entry(
        "jinfercept.cli.estimators:Estimators", "what good and bad predictions of call durations are worth"
    ),
    "bench paper": Entry(
        "jinfercept.cli.paper:Paper", "InferCept's latency by load, its waste and its ablation, simulated"
    ),
    "bench replay": Entry(
        "jinfercept.cli.replay:Replay", "play a workload in real time against the real engine, with scripted calls"
    ),
    "bench decisions": Entry(
        "jinfercept.cli.decisions:Decisions", "predicted waste and durations against actual, from decision records"
    ),
    "bench throughput": Entry(
        "jinfercept.cli.throughput:Throughput",
        "decode and prefill tokens per second by batch and context, beside other engines",
    ),
    "bench copying": Entry(
        "jinfercept.cli.copying:Copying", "decode tokens per second with and without drafts, on prompts that are copied"
    ),
    "bench sessions": Entry(
        "jinfercept.cli.sessions:Sessions", "sessions that take turns: time of a turn, and tokens that are recomputed"
    ),
    "study calls": Entry(
        "jinfercept.cli.study_calls:StudyCalls",
        "asynchronous calls beside synchronous and parallel ones: latency, memory, and the formulas",
    ),
    "study questions": Entry(
        "jinfercept.cli.study_questions:StudyQuestions", "what a reader of InferCept asks, answered by simulation"
    ),
    "study overflow": Entry(
        "jinfercept.cli.overflow:StudyOverflow", "recompute or swap when running requests overflow the KV pool"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as `run_command_line`. Without `argv` a server ends the process itself."""
    given = sys.argv[1:] if argv is None else argv
    status = run_command_line(PROG, DESCRIPTION, COMMANDS, given)
    if argv is None and status == 0 and "serve" in given[:1]:
        from jinfercept.server.exit_limit import end_process

        end_process()
    return status


if __name__ == "__main__":
    sys.exit(main())
