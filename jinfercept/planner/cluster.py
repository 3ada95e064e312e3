"""A simulated fleet: replicas on one virtual time line behind a real `Router`, or behind another way of routing.

Events are played in the order of their times: turns that arrive, and events of replicas. A turn that arrives while a replica's
step runs is seen by its next step. Replicas report their queues every `report_s` seconds, as real ones do; between two reports
the router relies on what it has sent itself.
"""

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, Protocol, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.replica_load import ReplicaState
from jinfercept.fleet.routing import Router
from jinfercept.meter.turns import LatencyLimits
from jinfercept.planner.sessions import AgentSession, Turn, first_turn
from jinfercept.planner.simulated_replicas import FinishedTurn, SimulatedReplica
from jinfercept.sched.profile import Profile

REPORT_S = 1.0
"""Seconds between two reports of a replica."""


class RoutingPolicy(Protocol):
    """Chooses the replica of a request."""

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> tuple[int, str]:
        """The replica's place among `replicas`, and why."""
        ...

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        """A request has ended."""
        ...


@final
class ByPrice:
    """The router of a fleet.

    Args:
        router: its replicas are named by their places: "0", "1", ….
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> tuple[int, str]:
        route = self._router.route(hint, replicas, now)
        return int(route.replica), route.reason

    def finished(
        self, hint: RoutingHint, replica: int, prompt_tokens: int, new_tokens: int, cached_tokens: int
    ) -> None:
        self._router.finished(hint, str(replica), prompt_tokens, new_tokens, cached_tokens=cached_tokens)


def by_price(profile: Profile, seed: int) -> ByPrice:
    """The router of a fleet whose replicas have this profile."""
    return ByPrice(Router(profile, chunk_tokens=profile.saturation, seed=seed))


class ClusterReport(NamedTuple):
    """Measurements of a simulated fleet.

    Attributes:
        turns: that were sent within the counted seconds; the rest of the report is of them.
        unfinished: of them, at the end of the run.
        good_share: of the turns, within the limits; unfinished ones are not.
        goodput_per_s: turns within the limits, over the seconds.
        found_share: of the prompt tokens, not recomputed.
        known_share: of the prompt tokens that some replica had computed before, not recomputed.
        home_share: of the follow-ups, sent to the replica of the turn before.
        first_token_s, turn_s: mean, median and 99th percentile, of the time from a turn's sending to its first and last token.
        token_s: mean seconds per token after the first one.
        busiest_share: of the turns, at the replica with the most.
        reasons: of the decisions, by name.
        busy_share: of all seconds, in which a replica's steps ran; the mean over replicas.
        seconds: of the simulated clock that were counted.
    """

    turns: int
    unfinished: int
    good_share: float
    goodput_per_s: float
    found_share: float
    known_share: float
    home_share: float
    first_token_s: tuple[float, float, float]
    turn_s: tuple[float, float, float]
    token_s: float
    busiest_share: float
    reasons: dict[str, int]
    busy_share: float
    seconds: float


@dataclass(slots=True)
class _Counts:
    """Sums of a run."""

    first_s: array
    turn_s: array
    token_s: array
    num_good: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0
    num_home: int = 0
    num_follow_ups: int = 0

    def add(self, finished: FinishedTurn, limits: LatencyLimits) -> None:
        turn = finished.turn
        first_s, rest_s = finished.first_token_s - turn.at_s, finished.finished_s - finished.first_token_s
        self.first_s.append(first_s)
        self.turn_s.append(finished.finished_s - turn.at_s)
        if turn.new_tokens > 1:
            self.token_s.append(rest_s / (turn.new_tokens - 1))
        self.num_good += limits.keeps(first_s, 0, rest_s, turn.new_tokens)
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += finished.cached_tokens
        self.known_tokens += turn.known_tokens


def play_cluster(
    replicas: Sequence[SimulatedReplica],
    policy: RoutingPolicy,
    sessions: Iterable[AgentSession],
    limits: LatencyLimits,
    most_s: float = math.inf,
    counted: tuple[float, float] = (0.0, math.inf),
    progress: Callable[[float], None] = lambda now: None,
) -> ClusterReport:
    """Play sessions until all have ended or `most_s` seconds have passed.

    Args:
        replicas: fresh ones.
        sessions: in the order of their starts.
        most_s: seconds after which the rest is unfinished.
        counted: seconds from and before which turns are sent that the report counts: those before fill the fleet.
        progress: called now and then with the seconds played.
    """
    states = tuple(ReplicaState(str(place)) for place in range(len(replicas)))
    counts = _Counts(array("f"), array("f"), array("f"))
    reasons, placed = Counter[str](), Counter[int]()
    follow_ups: list[tuple[float, int, Turn]] = []
    events, queued_s = list[tuple[float, int]](), [math.inf] * len(replicas)
    sent: dict[tuple[int, int], RoutingHint] = {}
    homes: dict[int, int] = {}
    coming, num_turns, num_sent, now = iter(sessions), 0, 0, 0.0
    upcoming = next(coming, None)

    def look_at(place: int) -> None:
        """Queue a replica's next event, and take its report if one is due."""
        replica, state = replicas[place], states[place]
        if (next_s := replica.next_s) < queued_s[place]:
            queued_s[place] = next_s
            heapq.heappush(events, (next_s, place))
        if now >= state.at_s + REPORT_S:
            state.queue_s, state.at_s = replica.queue_s(now), now

    while True:
        arrives_s = upcoming.at_s if upcoming is not None else math.inf
        follows_s = follow_ups[0][0] if follow_ups else math.inf
        event_s = events[0][0] if events else math.inf
        next_s = min(arrives_s, follows_s, event_s)
        if next_s > most_s or next_s == math.inf:
            break
        now = next_s
        if event_s < min(arrives_s, follows_s):
            place = heapq.heappop(events)[1]
            if event_s == queued_s[place]:
                queued_s[place] = math.inf
                if replicas[place].next_s <= event_s:
                    for finished in replicas[place].advance():
                        turn = finished.turn
                        if counted[0] <= turn.at_s < counted[1]:
                            counts.add(finished, limits)
                        hint = sent.pop((turn.session.number, turn.number))
                        policy.finished(hint, place, turn.prompt_tokens, turn.new_tokens, finished.cached_tokens)
                        if (following := turn.after(finished.finished_s)) is not None:
                            heapq.heappush(follow_ups, (following.at_s, turn.session.number, following))
                        else:
                            del homes[turn.session.number]
                look_at(place)
            continue
        if upcoming is not None and arrives_s <= follows_s:
            turn, upcoming = first_turn(upcoming), next(coming, None)
        else:
            turn = heapq.heappop(follow_ups)[2]
        hint = turn.hint()
        place, reason = policy.choose(hint, states, now)
        num_sent += 1
        if counted[0] <= now < counted[1]:
            num_turns += 1
            reasons[reason] += 1
            placed[place] += 1
        sent[turn.session.number, turn.number] = hint
        counts.num_follow_ups += turn.number > 0
        counts.num_home += homes.get(turn.session.number) == place
        homes[turn.session.number] = place
        replicas[place].submit(turn, now)
        look_at(place)
        if num_sent % 1000 == 0:
            progress(now)
    busy_share = fmean(replica.busy_s for replica in replicas) / (now or 1.0)
    seconds = min(now, counted[1]) - counted[0]
    return _report(counts, num_turns, reasons, placed, min(1.0, busy_share), max(0.0, seconds))


def _report(
    counts: _Counts, turns: int, reasons: Counter[str], placed: Counter[int], busy_share: float, seconds: float
) -> ClusterReport:
    return ClusterReport(
        turns=turns,
        unfinished=turns - len(counts.first_s),
        good_share=counts.num_good / max(1, turns),
        goodput_per_s=counts.num_good / (seconds or 1.0),
        found_share=counts.cached_tokens / max(1, counts.prompt_tokens),
        known_share=counts.cached_tokens / max(1, counts.known_tokens),
        home_share=counts.num_home / max(1, counts.num_follow_ups),
        first_token_s=_spread(counts.first_s),
        turn_s=_spread(counts.turn_s),
        token_s=fmean(counts.token_s) if counts.token_s else 0.0,
        busiest_share=max(placed.values(), default=0) / max(1, turns),
        reasons=dict(reasons.most_common()),
        busy_share=busy_share,
        seconds=seconds,
    )


def _spread(values: array) -> tuple[float, float, float]:
    """Mean, median and 99th percentile; zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return (0.0, 0.0, 0.0)
    return fmean(ordered), ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def mean_report(reports: Sequence[ClusterReport]) -> ClusterReport:
    """One report of several runs of the same length: counts added up, the rest averaged."""
    first = reports[0]
    if len(reports) == 1:
        return first
    reasons = Counter[str]()
    for report in reports:
        reasons.update(report.reasons)
    turns = sum(report.turns for report in reports)
    averaged = {
        name: fmean(getattr(report, name) for report in reports)
        for name in ("goodput_per_s", "found_share", "known_share", "home_share", "token_s", "busiest_share")
    }
    return first._replace(
        turns=turns,
        unfinished=sum(report.unfinished for report in reports),
        good_share=sum(report.good_share * report.turns for report in reports) / max(1, turns),
        first_token_s=_mean_spread([report.first_token_s for report in reports]),
        turn_s=_mean_spread([report.turn_s for report in reports]),
        reasons=dict(reasons.most_common()),
        busy_share=fmean(report.busy_share for report in reports),
        seconds=sum(report.seconds for report in reports),
        **averaged,
    )


def _mean_spread(spreads: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    mean, median, most = map(fmean, zip(*spreads, strict=True))
    return mean, median, most
