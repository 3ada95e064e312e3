"""`jinfercept bench sessions`: its flags, and those that other loads on servers have too."""

import argparse
from typing import TYPE_CHECKING, Any

from jinfercept.cli.flags import MODEL_HELP, Commands, add_flags

if TYPE_CHECKING:
    from jinfercept.bench.conversations import Style
    from jinfercept.bench.servers import Servers
    from jinfercept.bench.session_shape import SessionShape

SEVERAL = "; repeat it, or give several with commas"


def add_sessions(studies: Commands) -> None:
    sessions = studies.add_parser(
        "sessions", help="sessions that take turns: what each turn costs, and what is recomputed"
    )
    add_servers(sessions)
    going = sessions.add_argument_group("sessions")
    going.add_argument("--sessions", action="append", help=f"how many (default: 4,8){SEVERAL}")
    going.add_argument("--concurrent", action="store_true", help="all at once, instead of one after another")
    going.add_argument("--newcomer", action="store_true", help="after each round a new prompt: its first-token time")
    going.add_argument("--session-ids", action="store_true", help="name the session in the header x-session-id")
    going.add_argument("--seed", type=int, default=0, help="of texts and tools (default: 0)")
    add_shape(sessions, turns=4, system=0, prompt=900, tool=40, new=16, seconds="0")
    add_outputs(sessions)
    add_flags(sessions, without=("seed",))
    sessions.set_defaults(command_function=_sessions)


def add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("own", metavar="MODEL", nargs="?", help=f"start jinfercept serve with it: {MODEL_HELP}")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--base-url", action="append", metavar="[NAME=]URL", help="of a server that runs; repeat it to compare several"
    )
    servers.add_argument("--model", help="to ask it for (default: the first that it names)")
    servers.add_argument("--api-key", help="to send (default: none)")
    servers.add_argument("--timeout", type=float, default=600.0, help="seconds of a request (default: 600)")


def add_shape(
    parser: argparse.ArgumentParser, *, turns: int, system: int, prompt: int, tool: int, new: int, seconds: str
) -> None:
    shape = parser.add_argument_group("shape of a session")
    for name, default, text in (
        ("--system-tokens", system, "prompt that all sessions begin with; 0: none"),
        ("--prompt-tokens", prompt, "prompt of a session's own"),
        ("--turns", turns, "answers of a session, between which a tool runs"),
        ("--new-tokens", new, "of an answer"),
        ("--tool-tokens", tool, "of a tool's result"),
    ):
        shape.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    shape.add_argument(
        "--tool-seconds",
        default=seconds,
        help=f"that a tool takes: X, exp:MEAN or lognormal:MEDIAN,SIGMA (default: {seconds})",
    )
    shape.add_argument(
        "--token-ids",
        type=int,
        metavar="BELOW",
        help="prompts of random token ids on /v1/completions, not words in a chat",
    )
    shape.add_argument(
        "--tool-role", default="tool", choices=("tool", "user"), help="who brings a tool's result (default: tool)"
    )
    shape.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for all of --new-tokens, as vLLM's extension allows (default: on)",
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", help="write everything to this file, a row for each request")
    parser.add_argument("--plot", help="draw it into this file")


def _sessions(
    sessions: list[str] | None, concurrent: bool, session_ids: bool, json: str | None, plot: str | None, **rest: Any
) -> int:
    from jinfercept.bench.session_rounds import Going
    from jinfercept.cli.sessions import sessions_command

    newcomer, seed = rest.pop("newcomer"), rest.pop("seed")
    return sessions_command(
        *taken(rest),
        Going(concurrent, session_ids),
        sessions=sessions or ["4,8"],
        newcomer=newcomer,
        seed=seed,
        json_path=json,
        plot_path=plot,
    )


def taken(rest: dict[str, Any]) -> "tuple[Servers, Style, SessionShape]":
    """What is measured, how a client talks and in which lengths; all that is left are the engine's flags."""
    from jinfercept.bench.conversations import Style
    from jinfercept.bench.servers import Servers
    from jinfercept.bench.session_shape import SessionShape
    from jinfercept.bench.tool_times import tool_times

    take = rest.pop
    style = Style(
        system_tokens=take("system_tokens"),
        vocabulary=take("token_ids"),
        tool_role=take("tool_role"),
        ignore_eos=take("ignore_eos"),
    )
    shape = SessionShape(
        turns=take("turns"),
        prompt_tokens=take("prompt_tokens"),
        tool_tokens=take("tool_tokens"),
        new_tokens=take("new_tokens"),
        tool_seconds=tool_times(take("tool_seconds")),
    )
    servers = Servers(
        urls=take("base_url") or [],
        model=take("model"),
        api_key=take("api_key"),
        timeout_s=take("timeout"),
        own=take("own"),
        flags=rest,
    )
    return servers, style, shape
