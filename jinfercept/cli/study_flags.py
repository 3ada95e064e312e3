"""The commands that measure, simulate and study: `profile`, `simulate`, `bench …`. Each imports what it needs when it runs."""

import argparse
import os
from typing import Any

from jinfercept.cli.bench_flags import add_sessions
from jinfercept.cli.flags import MODEL_HELP, Commands, add_flags


def add_studies(commands: Commands) -> None:
    """All of them."""
    _add_profile(commands)
    _add_simulate(commands)
    studies = _bench_commands(commands)
    _add_estimators(studies)
    _add_paper(studies)
    _add_replay(studies)
    _add_decisions(studies)
    _add_throughput(studies)
    add_sessions(studies)


def _bench_commands(
    commands: Commands,
) -> Commands:
    """The group of studies: `jinfercept bench NAME`."""
    bench = commands.add_parser("bench", help="studies and measurements")
    return bench.add_subparsers(title="studies", metavar="STUDY", required=True)


def _add_estimators(studies: Commands) -> None:
    estimators = studies.add_parser("estimators", help="what good and bad predictions of call durations are worth")
    estimators.add_argument("--trace", help="scripts to draw from, a JSON line each (default: generated ones)")
    estimators.add_argument("--like", default="trace", choices=("trace", "table"), help="statistics if generated")
    estimators.add_argument("--profile", default="paper-gptj-6b-a100", help="a named profile, or a JSON file")
    estimators.add_argument(
        "--policy", action="append", help=f"{_policies()}; may be repeated (default: min_waste and copy_ahead)"
    )
    estimators.add_argument("--rate", type=float, default=3.5, help="requests per second (default: 3.5)")
    estimators.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals (default: 300)")
    estimators.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: 0)")
    estimators.add_argument("--kv-tokens", type=int, default=53_000, help="device pool (default: 53000)")
    estimators.add_argument("--host-tokens", type=int, default=300_000, help="host pool (default: 300000)")
    _add_jobs(estimators)
    estimators.add_argument("--json", help="write both studies to this file")
    estimators.add_argument("--plot", help="draw waste and latency into this file")
    estimators.set_defaults(command_function=_estimators)


def _add_paper(studies: Commands) -> None:
    paper = studies.add_parser("paper", help="InferCept's latency by load, its waste and its ablation, simulated")
    paper.add_argument(
        "--profile", action="append", help="a named profile, or a JSON file; may be repeated (default: the paper's two)"
    )
    paper.add_argument("--reference", help="the paper's Figure 2, digitised: a CSV file, to be drawn beside ours")
    paper.add_argument("--trace", help="scripts to draw from, a JSON line each (default: generated ones)")
    paper.add_argument("--duration", type=float, default=200.0, help="seconds of arrivals of a run (default: 200)")
    paper.add_argument("--rate", action="append", help="requests per second, with commas (default: 1 to 6, and 8)")
    paper.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: 0)")
    paper.add_argument("--kv-tokens", type=int, help="device pool (default: the paper's, or the profile's)")
    _add_jobs(paper)
    paper.add_argument("--out", default="paper", help="folder to write paper.md, .csv and .png to (default: paper)")
    paper.set_defaults(command_function=_paper)


def _add_replay(studies: Commands) -> None:
    replay = studies.add_parser(
        "replay", help="play a workload in real time against the real engine, with scripted calls"
    )
    replay.add_argument("model", help=MODEL_HELP)
    source = replay.add_mutually_exclusive_group()
    source.add_argument("--trace", help="scripts to draw from, a JSON line each")
    source.add_argument("--workload", default="mixed", help="mixed, math, qa, ve, chat, image or tts (default: mixed)")
    replay.add_argument(
        "--policy",
        action="append",
        help=f"{_policies(bounds=False)} (default: copy_ahead); repeat it, or give several with commas",
    )
    replay.add_argument("--rate", type=float, default=1.0, help="requests per second, before scaling (default: 1)")
    replay.add_argument(
        "--duration", type=float, default=60.0, help="seconds of arrivals, before scaling (default: 60)"
    )
    replay.add_argument("--seed", type=int, default=0, help="of the arrivals, tokens and random weights (default: 0)")
    replay.add_argument(
        "--scale-tokens", type=float, default=1.0, help="multiplies every number of tokens (default: 1)"
    )
    replay.add_argument("--scale-time", type=float, default=1.0, help="multiplies arrivals and calls (default: 1)")
    replay.add_argument("--host-tokens", type=int, help="host pool (default: what --swap-space holds)")
    replay.add_argument("--simulate", action="store_true", help="play the same in the simulator, and compare")
    replay.add_argument("--json", help="write the reports to this file")
    _add_records(replay)
    add_flags(replay, without=("policy", "seed"))
    replay.set_defaults(command_function=_replay)


def _add_decisions(studies: Commands) -> None:
    decisions = studies.add_parser(
        "decisions", help="predicted waste and durations against actual, from decision records"
    )
    decisions.add_argument("files", nargs="+", metavar="FILE", help="what --decisions has written")
    decisions.add_argument("--json", help="write the tables to this file")
    decisions.add_argument("--plot", help="draw calibration and waste into this file")
    decisions.set_defaults(command_function=_decisions)


def _add_throughput(studies: Commands) -> None:
    throughput = studies.add_parser(
        "throughput", help="decode and prefill tokens per second by batch and context, beside other engines"
    )
    throughput.add_argument("model", help=MODEL_HELP)
    several = "; repeat it, or give several with commas"
    throughput.add_argument("--dtype", action="append", help=f"float32 or bfloat16 (default: both){several}")
    throughput.add_argument("--batch", action="append", help=f"requests at once (default: 1,8,32){several}")
    throughput.add_argument("--context", action="append", help=f"prompt tokens (default: 32,1000){several}")
    throughput.add_argument("--new-tokens", type=int, default=32, help="tokens that each generates (default: 32)")
    throughput.add_argument("--peer", choices=("transformers",), help="measure Hugging Face transformers too")
    throughput.add_argument("--peer-python", help="the interpreter that has torch and transformers (default: this one)")
    throughput.add_argument(
        "--peer-command",
        action="append",
        metavar="NAME=COMMAND",
        help="another engine: reads the work as JSON, prints its cells as JSON; may be repeated",
    )
    throughput.add_argument("--json", help="write everything to this file")
    add_flags(throughput, without=("dtype", "kv_tokens", "max_num_seqs", "max_model_len", "enable_prefix_caching"))
    throughput.set_defaults(command_function=_throughput)


def _add_simulate(commands: Commands) -> None:
    simulate = commands.add_parser("simulate", help="play a workload against the scheduler under a virtual clock")
    source = simulate.add_mutually_exclusive_group()
    source.add_argument("--trace", help="scripts to draw from, a JSON line each")
    source.add_argument("--workload", default="mixed", help="mixed, math, qa, ve, chat, image or tts (default: mixed)")
    simulate.add_argument("--like", default="trace", choices=("trace", "table"), help="statistics of the workload")
    simulate.add_argument("--profile", default="paper-gptj-6b-a100", help="a named profile, or a JSON file")
    several = "; repeat it, or give several with commas, for all combinations"
    simulate.add_argument("--policy", action="append", help=f"{_policies()} (default: copy_ahead){several}")
    simulate.add_argument("--rate", action="append", help=f"requests per second (default: 3.5){several}")
    simulate.add_argument("--seed", action="append", help=f"of the arrivals (default: 0){several}")
    simulate.add_argument(
        "--estimator", default="elapsed", help=f"of durations: {_estimator_names()} (default: elapsed)"
    )
    simulate.add_argument("--burstiness", type=float, default=1.0, help="variation of gaps; 1 is Poisson (default: 1)")
    simulate.add_argument("--duration", type=float, default=1200.0, help="seconds of arrivals (default: 1200)")
    simulate.add_argument("--kv-tokens", type=int, default=53_000, help="device pool (default: 53000)")
    simulate.add_argument("--host-tokens", type=int, default=300_000, help="host pool (default: 300000)")
    simulate.add_argument("--page-size", type=int, default=16, help="tokens per page (default: 16)")
    simulate.add_argument("--max-num-seqs", type=int, default=1024, help="sequences that run at once (default: 1024)")
    simulate.add_argument(
        "--max-model-len",
        type=int,
        default=2560,
        help="tokens of the longest request, and of a step where prompts are whole (default: 2560)",
    )
    simulate.add_argument(
        "--chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="prefill in chunks beside decodes, or whole prompts first (default: as the policy was published)",
    )
    simulate.add_argument(
        "--preemption",
        default="auto",
        choices=("auto", "recompute", "swap"),
        help="context of a running sequence that gives way (default: auto, the policy's choice)",
    )
    _add_jobs(simulate)
    simulate.add_argument("--json", help="write the reports to this file")
    simulate.add_argument("--csv", help="write a row for each run to this file")
    simulate.add_argument("--plot", help="draw latency against rate into this file")
    _add_records(simulate)
    simulate.set_defaults(command_function=_simulate)


def _policies(bounds: bool = True) -> str:
    from jinfercept.sched.policies import SETTINGS

    return ", ".join((*SETTINGS, *(("bound", "free_pause") if bounds else ())))


def _estimator_names() -> str:
    from jinfercept.sched.estimator import ESTIMATORS
    from jinfercept.sim.scaled_estimator import SCALED_ESTIMATORS

    return ", ".join((*ESTIMATORS, "oracle", *SCALED_ESTIMATORS))


def _add_records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decisions", help="write every decision to this file (see `jinfercept bench decisions`)")
    parser.add_argument("--chrome-trace", help="write a trace to this file, to be opened in Perfetto")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help=f"processes at a time (default: {cores}, the cores)")


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser("profile", help="measure what steps and transfers cost on this machine")
    profile.add_argument("model", help=MODEL_HELP)
    profile.add_argument("--out", help="write the profile to this JSON file; engines here find it without")
    profile.add_argument("--plot", help="draw steps, fit, residuals and bandwidths into this file")
    profile.add_argument("--quick", action="store_true", help="only what an engine measures that starts without one")
    add_flags(profile, without=("profile",))
    profile.set_defaults(command_function=_profile)


def _profile(model: str, out: str | None, plot: str | None, quick: bool, **flags: Any) -> int:
    from jinfercept.cli.profile import profile

    return profile(model, out=out, plot=plot, quick=quick, **flags)


def _simulate(
    policy: list[str] | None,
    rate: list[str] | None,
    seed: list[str] | None,
    json: str | None,
    csv: str | None,
    plot: str | None,
    decisions: str | None,
    chrome_trace: str | None,
    **options: Any,
) -> int:
    from jinfercept.cli.simulate import simulate
    from jinfercept.sim.recording import RecordFiles

    return simulate(
        records=RecordFiles(decisions, chrome_trace),
        policies=policy or ["copy_ahead"],
        rates=rate or ["3.5"],
        seeds=seed or ["0"],
        json_path=json,
        csv_path=csv,
        plot_path=plot,
        **options,
    )


def _estimators(policy: list[str] | None, jobs: int | None, json: str | None, plot: str | None, **options: Any) -> int:
    from jinfercept.cli.estimators import study

    return study(
        policies=policy or ["min_waste", "copy_ahead"],
        jobs=jobs or os.cpu_count() or 1,
        json_path=json,
        plot_path=plot,
        **options,
    )


def _paper(profile: list[str] | None, rate: list[str] | None, **options: Any) -> int:
    from jinfercept.cli.paper import DEFAULT_RATES, POOLS, paper

    return paper(profiles=profile or list(POOLS), rates=rate or DEFAULT_RATES, **options)


def _decisions(files: list[str], json: str | None, plot: str | None) -> int:
    from jinfercept.cli.decisions import decisions

    return decisions(files, json_path=json, plot_path=plot)


def _throughput(
    model: str,
    dtype: list[str] | None,
    batch: list[str] | None,
    context: list[str] | None,
    peer_command: list[str] | None,
    json: str | None,
    **options: Any,
) -> int:
    from jinfercept.cli.throughput import throughput

    return throughput(
        model,
        dtype=dtype or ["float32,bfloat16"],
        batch=batch or ["1,8,32"],
        context=context or ["32,1000"],
        peer_command=peer_command or [],
        json_path=json,
        **options,
    )


def _replay(
    model: str,
    policy: list[str] | None,
    json: str | None,
    decisions: str | None,
    chrome_trace: str | None,
    **options: Any,
) -> int:
    from jinfercept.cli.replay import replay_command
    from jinfercept.sim.recording import RecordFiles

    return replay_command(
        model,
        policies=policy or ["copy_ahead"],
        json_path=json,
        records=RecordFiles(decisions, chrome_trace),
        **options,
    )
