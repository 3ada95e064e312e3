"""The `jinfercept` command. Every command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Sequence

from jinfercept import __version__
from jinfercept.cli import run as run_command
from jinfercept.cli import serve as serve_command
from jinfercept.cli.flags import MODEL_HELP, Commands, Parser, add_flags
from jinfercept.cli.study_flags import add_studies
from jinfercept.errors import EngineError, JinferceptError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as `run_command_line`."""
    return run_command_line(build_parser(), argv)


def run_command_line(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Run the command that a command line names; returns the exit status. A user's mistake is one line on standard error and
    status 2, an engine that failed is one line and status 1."""
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
    except EngineError as error:
        print(f"jinfercept: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jinfercept: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = Parser(
        prog="jinfercept", description="A JAX serving engine for language models that call out while they write."
    )
    parser.add_argument("--version", action="version", version=f"jinfercept {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands.add_parser("demo", help="SmolLM2 answers word problems with tools, under every policy")
    demo.add_argument("--requests", type=int, default=12, help="word problems (default: 12)")
    demo.add_argument("--slow-s", type=float, default=1.5, help="seconds that the slow tool takes (default: 1.5)")
    demo.add_argument("--show", type=int, default=2, help="answers to print (default: 2)")
    demo.set_defaults(command_function=_demo)

    run = commands.add_parser("run", help="generate from a prompt, or chat, with tools if you like")
    run_command.add_arguments(run)
    add_flags(run)
    run.set_defaults(command_function=run_command.run)

    serve = commands.add_parser("serve", help="answer OpenAI's clients over HTTP")
    serve_command.add_arguments(serve)
    add_flags(serve)
    serve.set_defaults(command_function=serve_command.serve)

    info = commands.add_parser("info", help="what a model is and what it needs")
    info.add_argument("model", help=MODEL_HELP)
    info.set_defaults(command_function=_info)
    _add_convert(commands)
    add_studies(commands)
    return parser


def _add_convert(commands: Commands) -> None:
    convert = commands.add_parser("convert", help="write a model so that it loads quickly (Orbax)")
    convert.add_argument("model", help=MODEL_HELP)
    convert.add_argument("directory", help="to write to; give it wherever a model is asked for")
    convert.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the weights (default: auto)"
    )
    convert.set_defaults(command_function=_convert)


def _demo(requests: int, slow_s: float, show: int) -> int:
    from jinfercept.cli.demo import demo

    return demo(num_requests=requests, slow_s=slow_s, num_shown=show)


def _info(model: str) -> int:
    from jinfercept.cli.terminal import describe
    from jinfercept.models.load import read_config

    describe(model, read_config(model))
    return 0


def _convert(model: str, directory: str, dtype: str) -> int:
    from jinfercept.cli.convert import convert

    return convert(model, directory, dtype=dtype)  # pyright: ignore[reportArgumentType] # a choice of its option


if __name__ == "__main__":
    sys.exit(main())
