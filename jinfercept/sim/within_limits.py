"""Agents within limits: the most live sessions of which enough turns keep the limits, by bisection. Imports no JAX.

It is the measure of AA-AgentPerf, MLPerf Endpoints and InferenceX: how many agents a machine serves so that their users do
not wait. More sessions are tried until too few turns keep the limits; between the last two numbers the interval is halved.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from jinfercept.engine.meter.counts import LatencyLimits
from jinfercept.errors import ConfigError
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import INTERRUPTED, SweepRun

AGENT_LIMITS = LatencyLimits(first_token_s=2.0, per_token_s=1 / 30)
"""2 s and 1 s more for each 10,000 new tokens to the first token, then 30 tokens a second."""
KEPT_SHARE = 0.95
"""Share of the turns that must keep the limits."""
FIRST = 8
"""Live sessions with which the search begins."""
MOST_LIVE = 1024
"""Live sessions at which the search ends."""

type Shares = dict[int, float]
"""Shares of turns within limits, by the number of live sessions that was tried."""


def most_within_limits[T](
    trials: Sequence[T],
    run: Callable[[T, int], SweepRun],
    play: Callable[[Sequence[SweepRun]], Sequence[Report]],
) -> dict[T, Shares]:
    """The shares that were measured for each trial, such as a contender and a seed; `most_kept` is the answer.

    `run` makes the run of a trial with a number of live sessions. `play` is called once for each step of the search, with the
    runs of all trials that go on. Raises `ConfigError` if a run failed or had no turn that counts, and `KeyboardInterrupt` if
    one was interrupted.
    """
    tried: dict[T, Shares] = {trial: {} for trial in trials}
    while steps := [(trial, live) for trial, shares in tried.items() if (live := next_live(shares))]:
        runs = [run(*step) for step in steps]
        for (trial, live), step_run, report in zip(steps, runs, play(runs), strict=True):
            if report.get("error") == INTERRUPTED:
                raise KeyboardInterrupt
            if "error" in report:
                raise ConfigError("a run failed", got=f"{step_run}: {report['error']}", fix="see the error")
            share = report["within_limits_share"]
            if share is None:
                raise ConfigError("no turn was counted", got=step_run, fix="a longer --duration or a shorter --warm-up")
            tried[trial][live] = share
    return tried


def next_live(shares: Mapping[int, float]) -> int | None:
    """The number of live sessions to try next; None if the answer is known."""
    kept = most_kept(shares)
    broken = min((live for live in shares if live > kept), default=None)
    if broken is None:
        live = min(MOST_LIVE, kept + max(1, kept // 2) if kept else FIRST)  # runs of too many sessions take longest
        return live if live not in shares else None
    return (kept + broken) // 2 if broken - kept > 1 else None


def most_kept(shares: Mapping[int, float]) -> int:
    """The most live sessions of which enough turns kept the limits; 0 if there is no such number."""
    return max((live for live, share in shares.items() if share >= KEPT_SHARE), default=0)


def search_report(by_seed: Mapping[int, Shares]) -> Report:
    """The answers of seeds: `agents`, their mean, least and most, and the shares for each seed."""
    agents = [most_kept(shares) for shares in by_seed.values()]
    return {
        "agents": {"mean": fmean(agents), "least": min(agents), "most": max(agents)},
        "seeds": {
            str(seed): {"agents": most_kept(shares), "within_limits_share": {str(n): shares[n] for n in sorted(shares)}}
            for seed, shares in by_seed.items()
        },
    }
