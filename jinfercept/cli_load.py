"""`jinfercept bench serve`, `sessions` and `soak`: their flags. Each imports what it needs when it runs."""

import argparse
from typing import TYPE_CHECKING, Any

from jinfercept.cli_flags import MODEL_HELP, Commands, add_flags
from jinfercept.errors import ConfigError

if TYPE_CHECKING:
    from jinfercept.bench.conversations import Style
    from jinfercept.bench.load_command import Shape
    from jinfercept.bench.servers import Servers

_SEVERAL = "; repeat it, or give several with commas"


def add_load(studies: Commands) -> None:
    """All of them."""
    _add_serve(studies)
    _add_sessions(studies)
    _add_soak(studies)


def _add_serve(studies: Commands) -> None:
    serve = studies.add_parser("serve", help="load on OpenAI-compatible servers: latencies, cached tokens, errors")
    _add_servers(serve)
    load = serve.add_argument_group("load")
    load.add_argument("--request-rate", action="append", help=f"sessions that begin in a second, Poisson{_SEVERAL}")
    load.add_argument(
        "--concurrency",
        action="append",
        help=f"sessions that run at a time, instead of a rate (default: 8; with --offline 32){_SEVERAL}",
    )
    load.add_argument("--sessions", type=int, help="of every run (default: 32)")
    load.add_argument("--seed", action="append", help=f"of arrivals, texts and tools (default: 0){_SEVERAL}")
    load.add_argument(
        "--offline",
        action="store_true",
        help="compare MODEL's server with the offline engine on the same prompts, of one turn, all at once",
    )
    source = load.add_mutually_exclusive_group()
    source.add_argument("--trace", help="scripts to draw sessions from, a JSON line each; instead of the shape below")
    source.add_argument("--workload", help="mixed, math, qa, ve, chat, image or tts, generated; instead of the shape")
    _add_shape(serve, turns=4, system=256, prompt=256, tool=64, new=64, seconds="exp:1")
    _add_outputs(serve)
    add_flags(serve, without=("seed",))
    serve.set_defaults(command_function=_serve)


def _add_sessions(studies: Commands) -> None:
    sessions = studies.add_parser(
        "sessions", help="sessions that take turns: what each turn costs, and what is recomputed"
    )
    _add_servers(sessions)
    going = sessions.add_argument_group("sessions")
    going.add_argument("--sessions", action="append", help=f"how many (default: 4,8){_SEVERAL}")
    going.add_argument("--concurrent", action="store_true", help="all at once, instead of one after another")
    going.add_argument("--newcomer", action="store_true", help="after each round a new prompt: its first-token time")
    going.add_argument("--session-ids", action="store_true", help="name the session in the header x-session-id")
    going.add_argument("--seed", type=int, default=0, help="of texts and tools (default: 0)")
    _add_shape(sessions, turns=4, system=0, prompt=900, tool=40, new=16, seconds="0")
    _add_outputs(sessions)
    add_flags(sessions, without=("seed",))
    sessions.set_defaults(command_function=_sessions)


def _add_soak(studies: Commands) -> None:
    soak = studies.add_parser(
        "soak", help="random clients, hostile tools, disconnects, kills: nothing may be lost, hang, leak or be wrong"
    )
    soak.add_argument("model", nargs="?", help=f"{MODEL_HELP} (default: a tiny random one)")
    soak.add_argument("--minutes", type=float, default=10.0, help="of load; the checks come besides (default: 10)")
    soak.add_argument("--clients", type=int, default=12, help="at a time (default: 12)")
    soak.add_argument(
        "--patience",
        type=float,
        default=60.0,
        dest="patience_s",
        help="seconds without a byte after which a request counts as hung (default: 60)",
    )
    soak.add_argument("--seed", type=int, default=0, help="of everything that clients do (default: 0)")
    soak.add_argument(
        "--hostile",
        type=int,
        default=0,
        metavar="CLIENTS",
        help="hostile clients with a key of their own in the second half of the rounds: what they do to the others' "
        "first tokens, and to the server's memory (default: 0)",
    )
    soak.add_argument("--json", help="write everything to this file")
    add_flags(soak, without=("seed",))
    soak.set_defaults(command_function=_soak)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("own", metavar="MODEL", nargs="?", help=f"start jinfercept serve with it: {MODEL_HELP}")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--base-url", action="append", metavar="[NAME=]URL", help="of a server that runs; repeat it to compare several"
    )
    servers.add_argument("--model", help="to ask it for (default: the first that it names)")
    servers.add_argument("--api-key", help="to send (default: none)")
    servers.add_argument("--timeout", type=float, default=600.0, help="seconds of a request (default: 600)")


def _add_shape(
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


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", help="write everything to this file, a row for each request")
    parser.add_argument("--plot", help="draw it into this file")


def _serve(
    request_rate: list[str] | None,
    concurrency: list[str] | None,
    sessions: int | None,
    seed: list[str] | None,
    offline: bool,
    json: str | None,
    plot: str | None,
    **rest: Any,
) -> int:
    from jinfercept.bench.load_command import load_command

    if offline:
        more = (("--request-rate", request_rate), ("--sessions", sessions), *_sources(rest))
        if given := [flag for flag, value in more if value is not None]:
            raise ConfigError("--offline has prompts of its own", got=", ".join(given), fix="leave them out")
        return _offline(concurrency or ["32"], seed or ["0"], json, plot, **rest)
    sources = {name.removeprefix("--"): value for name, value in _sources(rest)}
    return load_command(
        *_taken(rest),
        **sources,
        sessions=32 if sessions is None else sessions,
        request_rates=request_rate or [],
        concurrencies=concurrency or ([] if request_rate else ["8"]),
        seeds=seed or ["0"],
        json_path=json,
        plot_path=plot,
    )


def _offline(concurrency: list[str], seed: list[str], json: str | None, plot: str | None, **rest: Any) -> int:
    from jinfercept.bench.overhead_command import overhead_command
    from jinfercept.bench.simulate_command import numbers

    single = {}
    for flag, texts in (("--concurrency", concurrency), ("--seed", seed)):
        values = numbers(flag, texts, int)
        if len(values) > 1:
            raise ConfigError(f"--offline takes one {flag}", got=", ".join(texts), fix="give one")
        single[flag.removeprefix("--")] = values[0]
    servers, style, shape = _taken(rest)
    return overhead_command(servers, style, shape._replace(turns=1), **single, json_path=json, plot_path=plot)


def _sessions(
    sessions: list[str] | None, concurrent: bool, session_ids: bool, json: str | None, plot: str | None, **rest: Any
) -> int:
    from jinfercept.bench.session_rounds import Going
    from jinfercept.bench.sessions_command import sessions_command

    newcomer, seed = rest.pop("newcomer"), rest.pop("seed")
    return sessions_command(
        *_taken(rest),
        Going(concurrent, session_ids),
        sessions=sessions or ["4,8"],
        newcomer=newcomer,
        seed=seed,
        json_path=json,
        plot_path=plot,
    )


def _soak(
    model: str | None,
    minutes: float,
    clients: int,
    patience_s: float,
    seed: int,
    hostile: int,
    json: str | None,
    **flags: Any,
) -> int:
    from jinfercept.bench.soak_command import soak_command

    return soak_command(
        model,
        flags,
        minutes=minutes,
        clients=clients,
        patience_s=patience_s,
        seed=seed,
        hostile=hostile,
        json_path=json,
    )


def _sources(rest: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Take out where sessions are drawn from."""
    return [(flag, rest.pop(flag.removeprefix("--"))) for flag in ("--trace", "--workload")]


def _taken(rest: dict[str, Any]) -> "tuple[Servers, Style, Shape]":
    """What is measured, how a client talks and in which lengths; all that is left are the engine's flags."""
    from jinfercept.bench.conversations import Style
    from jinfercept.bench.load_command import Shape
    from jinfercept.bench.servers import Servers
    from jinfercept.bench.tool_times import tool_times

    take = rest.pop
    style = Style(
        system_tokens=take("system_tokens"),
        vocabulary=take("token_ids"),
        tool_role=take("tool_role"),
        ignore_eos=take("ignore_eos"),
    )
    shape = Shape(
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
