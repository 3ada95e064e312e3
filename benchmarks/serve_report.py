"""What a run of sessions against a server comes to: latencies, tokens, errors; as a dictionary, a table and a picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.serve_load import ClientLoad, LoadRun, PlayedSession
from jinfercept.bench.client_report import Report, failures, number, percent, row, share, spread, total
from jinfercept.bench.openai_client import ClientReply
from jinfercept.sim.plots import Bars, draw

BUSY_CLIENT = 0.8
"""Share of a core above which the client may be what is measured."""


def report(server: str, model: str, load: ClientLoad, seed: int, run: LoadRun) -> Report:
    """Everything of one run. Latencies are of what succeeded; what failed is counted by kind, and has its row.

    Returns:
        `ttft_s`: from a request to its first piece. `inter_token_s`: between its pieces, each of which is a token on most
        servers. `token_s`: of one request, from the first piece to the end over the tokens after the first. `request_s`: from
        a request to its end. `session_s`: from a session's first request to its last answer, its tools' time included;
        `session_served_s`: without it. Tokens are as the server counts them, None where it does not.
    """
    replies = [reply for session in run.sessions for reply in session.replies]
    done = [reply for reply in replies if reply.error is None]
    whole = [session for session in run.sessions if session.replies[-1].error is None]
    prompt = total(reply.prompt_tokens for reply in done)
    cached = total(reply.cached_tokens for reply in done)
    completion = total(reply.completion_tokens for reply in done)
    return {
        "server": server,
        "model": model,
        "load": load._asdict(),
        "seed": seed,
        "sessions": run.planned,
        "sessions_completed": len(whole),
        "sessions_played": len(run.sessions),
        "requests": len(replies),
        "requests_completed": len(done),
        "errors": dict(Counter(reply.error for reply in replies if reply.error is not None)),
        "seconds": run.seconds,
        "ttft_s": spread(reply.first_s for reply in done),
        "inter_token_s": spread(gap for reply in done for gap in _gaps(reply)),
        "token_s": spread(_token_s(reply) for reply in done),
        "request_s": spread(reply.seconds for reply in done),
        "session_s": spread(session.ended_s - session.began_s for session in whole),
        "session_served_s": spread(session.ended_s - session.began_s - session.tool_s for session in whole),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": share(cached, prompt),
        "completion_tokens": completion,
        "output_tokens_per_s": None if completion is None else completion / (run.seconds or 1.0),
        "requests_per_s": len(done) / (run.seconds or 1.0),
        "sessions_per_s": len(whole) / (run.seconds or 1.0),
        "client_cpu_s": run.client_cpu_s,
        "client_cpu_share": run.client_cpu_s / (run.seconds or 1.0),
        "rows": [row for number, session in enumerate(run.sessions) for row in _rows(number, session, run)],
    }


def _rows(number: int, session: PlayedSession, run: LoadRun) -> list[dict[str, Any]]:
    origin_s = min(session.began_s for session in run.sessions)
    return [
        {"session": number, "kind": session.script.kind, "turn": turn} | row(reply, origin_s)
        for turn, reply in enumerate(session.replies, 1)
    ]


def _gaps(reply: ClientReply) -> list[float]:
    return [after - before for before, after in zip(reply.piece_s, reply.piece_s[1:], strict=False)]


def _token_s(reply: ClientReply) -> float | None:
    if reply.first_s is None or reply.completion_tokens is None or reply.completion_tokens < 2:
        return None
    return (reply.seconds - reply.first_s) / (reply.completion_tokens - 1)


# -- what is shown -----------------------------------------------------------------------------------------------------


_LATENCIES: Mapping[str, tuple[str, float]] = {
    "TTFT ms": ("ttft_s", 1e3),
    "token ms": ("inter_token_s", 1e3),
    "request s": ("request_s", 1.0),
    "session s": ("session_s", 1.0),
}
_RATES = {"tokens/s": "output_tokens_per_s", "sessions/s": "sessions_per_s"}
_SHARES = {"cached": "cached_share", "client CPU": "client_cpu_share"}


def _value(report: Report, name: str, statistic: str = "p50") -> float | None:
    """What a column shows, in its unit."""
    if name in _LATENCIES:
        key, scale = _LATENCIES[name]
        return scale * report[key][statistic] if report[key] else None
    return report[(_RATES | _SHARES)[name]]


def table(reports: Sequence[Report]) -> Table:
    """A row for each server, load and seed."""
    seeds = len({report["seed"] for report in reports}) > 1
    caption = "latencies: median and p99; cached: share of prompt tokens; client CPU: share of a core"
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    for name in ("server", "load", *(("seed",) if seeds else ())):
        shown.add_column(name, no_wrap=True)
    latencies = (column for name in _LATENCIES for column in (name, "p99"))
    for name in (*latencies, *_RATES, *_SHARES, "done"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("errors", no_wrap=True)
    for run_report in reports:
        cells = [number(_value(run_report, name, statistic)) for name in _LATENCIES for statistic in ("p50", "p99")]
        cells += [number(_value(run_report, name)) for name in _RATES]
        cells += [percent(_value(run_report, name)) for name in _SHARES]
        errors = ", ".join(f"{count} × {kind}" for kind, count in run_report["errors"].items())
        done = f"{run_report['sessions_completed']}/{run_report['sessions']}"
        seed = (str(run_report["seed"]),) if seeds else ()
        shown.add_row(run_report["server"], str(ClientLoad(**run_report["load"])), *seed, *cells, done, errors)
    return shown


def remarks(reports: Sequence[Report]) -> list[str]:
    """What has to be known to read the table."""
    lines = []
    busiest = max(run_report["client_cpu_share"] for run_report in reports)
    if busiest > BUSY_CLIENT:
        lines.append(f"the client used {busiest:.0%} of a core: it may be what was measured, use more of them")
    if any(run_report["requests_completed"] and run_report["cached_tokens"] is None for run_report in reports):
        lines.append("some answers do not say how many tokens were cached (usage.prompt_tokens_details.cached_tokens)")
    lines += failures(reports)
    return lines + [
        f"{run_report['server']}: interrupted, {left} of {run_report['sessions']} sessions are not counted"
        for run_report in reports
        if (left := run_report["sessions"] - run_report["sessions_played"])
    ]


def plot(path: str, reports: Sequence[Report]) -> None:
    """Draw latencies, throughput and cached shares by load, servers beside each other."""
    panels = {
        "time to first token, median": ("ms", "TTFT ms"),
        "between tokens, median": ("ms", "token ms"),
        "session, median": ("s", "session s"),
        "generated": ("tokens/s", "tokens/s"),
        "prompt tokens cached": ("share", "cached"),
        "client's CPU": ("share of a core", "client CPU"),
    }
    bars = [Bars(title, unit, _by_load(reports, name), beside=True) for title, (unit, name) in panels.items()]
    draw(path, [bars[:3], bars[3:]])


def _by_load(reports: Sequence[Report], name: str) -> Mapping[str, Mapping[str, float]]:
    """For each load the mean over seeds of each server."""
    points: dict[str, dict[str, list[float]]] = {}
    for run_report in reports:
        value = _value(run_report, name)
        by_server = points.setdefault(str(ClientLoad(**run_report["load"])), {})
        if value is not None:
            by_server.setdefault(run_report["server"], []).append(value)
    return {load: {server: fmean(values) for server, values in each.items()} for load, each in points.items()}
