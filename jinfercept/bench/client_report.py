"""Replies of servers as JSON values and as cells of a table."""

from collections.abc import Iterable, Sequence
from typing import Any

from jinfercept.bench.openai_client import ClientReply
from jinfercept.sim.reports import percentiles
from jinfercept.sim.tables import number_text

Report = dict[str, Any]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 of the values, Nones left out; None if there are none."""
    return percentiles(values, (50, 90, 99))


def share(part: int | None, whole: int | None) -> float | None:
    """A part over the whole; None if one of them is unknown, or the whole is 0."""
    return part / whole if part is not None and whole else None


def row(reply: ClientReply, origin_s: float) -> dict[str, Any]:
    """A reply as JSON values. Times are in seconds; `sent_s` counts from the origin."""
    return {
        "sent_s": reply.sent_s - origin_s,
        "ttft_s": reply.first_s,
        "seconds": reply.seconds,
        "pieces": len(reply.piece_s),
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
        "error": reply.error,
        "detail": reply.detail,
    }


def total(values: Iterable[int | None]) -> int | None:
    """Their sum; None if one of them is unknown, or there are none."""
    numbers = list(values)
    counted = [value for value in numbers if value is not None]
    return sum(counted) if numbers and len(counted) == len(numbers) else None


def number(value: float | None) -> str:
    """A number as a cell; `-` for None."""
    return "-" if value is None else number_text(value)


def percent(value: float | None) -> str:
    """A share as a cell, in percent; `-` for None."""
    return "-" if value is None else f"{value:.0%}"


def failures(reports: Sequence[Report]) -> list[str]:
    """One line for each server and error: the detail of the first failure that has one."""
    firsts: dict[tuple[str, str], str] = {}
    for report in reports:
        for request in report["rows"]:
            if request["detail"]:
                firsts.setdefault((report["server"], request["error"]), request["detail"])
    return [f"{server}: {error}: {detail}" for (server, error), detail in firsts.items()]
