"""The `jinfercept` command. Flags are generated from `config.py`; every command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jinfercept import __version__
from jinfercept.config import flag_fields
from jinfercept.errors import JinferceptError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's mistake is one line on standard error, and status 2."""
    parser = _parser()
    arguments = vars(parser.parse_args(argv))
    command = arguments.pop("command_function", None)
    if command is None:
        parser.print_help()
        return 0
    try:
        return command(**arguments)
    except JinferceptError as error:
        print(f"jinfercept: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jinfercept: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jinfercept", description="A JAX serving engine for language models that call out while they write."
    )
    parser.add_argument("--version", action="version", version=f"jinfercept {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands.add_parser("demo", help="SmolLM2 answers word problems with tools, under every policy")
    demo.add_argument("--requests", type=int, default=12, help="word problems (default: 12)")
    demo.add_argument("--slow-s", type=float, default=1.5, help="seconds that the slow tool takes (default: 1.5)")
    demo.add_argument("--show", type=int, default=2, help="answers to print (default: 2)")
    demo.set_defaults(command_function=_demo)

    run = commands.add_parser("run", help="generate from a prompt, or chat")
    run.add_argument("model", help="smollm2-135m, a Hugging Face directory or a .gguf file")
    run.add_argument("--prompt", help="complete this text and end; without it: a chat")
    run.add_argument("--max-tokens", type=int, default=256, help="tokens to generate (default: 256)")
    run.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    _add_flags(run)
    run.set_defaults(command_function=_run)

    info = commands.add_parser("info", help="what a model is and what it needs")
    info.add_argument("model", help="smollm2-135m, a Hugging Face directory or a .gguf file")
    info.set_defaults(command_function=_info)
    _add_simulate(commands)
    return parser


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser("simulate", help="play a workload against the scheduler under a virtual clock")
    source = simulate.add_mutually_exclusive_group()
    source.add_argument("--trace", help="scripts to draw from, a JSON line each")
    source.add_argument("--workload", default="mixed", help="mixed, math, qa, ve, chat, image or tts (default: mixed)")
    simulate.add_argument("--like", default="trace", choices=("trace", "table"), help="statistics of the workload")
    simulate.add_argument("--profile", default="paper-gptj-6b-a100", help="a named profile, or a JSON file")
    simulate.add_argument("--policy", action="append", help="may be repeated (default: copy_ahead)")
    simulate.add_argument("--estimator", default="elapsed", help="how durations are predicted (default: elapsed)")
    simulate.add_argument("--rate", type=float, default=3.5, help="requests per second (default: 3.5)")
    simulate.add_argument("--burstiness", type=float, default=1.0, help="variation of gaps; 1 is Poisson (default: 1)")
    simulate.add_argument("--duration", type=float, default=1200.0, help="seconds of arrivals (default: 1200)")
    simulate.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: 0)")
    simulate.add_argument("--kv-tokens", type=int, default=53_000, help="device pool (default: 53000)")
    simulate.add_argument("--host-tokens", type=int, default=300_000, help="host pool (default: 300000)")
    simulate.add_argument("--page-size", type=int, default=16, help="tokens per page (default: 16)")
    simulate.add_argument("--json", help="write the reports to this file")
    simulate.set_defaults(command_function=_simulate)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """The options of `LLM`; those that are not given keep the defaults of `config.py`."""
    group = parser.add_argument_group("engine")
    for field, kind in flag_fields():
        name = "--" + field.name.replace("_", "-")
        default = "" if field.default is None else f" (default: {field.default})"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": field.metadata["help"] + default}
        if kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(name, type=kind, choices=field.metadata["choices"] or None, **common)


def _demo(requests: int, slow_s: float, show: int) -> int:
    from jinfercept.bench.demo import demo

    return demo(num_requests=requests, slow_s=slow_s, num_shown=show)


def _run(model: str, prompt: str | None, max_tokens: int, temperature: float, **flags: Any) -> int:
    from jinfercept.llm import LLM
    from jinfercept.progress import StartDisplay
    from jinfercept.request import SamplingParams
    from jinfercept.terminal import chat, complete

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with StartDisplay() as progress, LLM(model, progress=progress, **flags) as llm:
        progress.close()
        if prompt is not None:
            complete(llm, prompt, params)
        else:
            chat(llm, params)
    return 0


def _info(model: str) -> int:
    from jinfercept.models.load import read_config
    from jinfercept.terminal import describe

    describe(model, read_config(model))
    return 0


def _simulate(policy: list[str] | None, json: str | None, **options: Any) -> int:
    from jinfercept.bench.simulate_command import simulate

    return simulate(policies=policy or ["copy_ahead"], json_path=json, **options)


if __name__ == "__main__":
    sys.exit(main())
