"""A simulated fleet: replicas on one virtual time line behind a real `Router`, or behind another way of routing.

Events are played in the order of their times: turns that arrive, and events of replicas. A turn that arrives while a replica's
step runs is seen by its next step. Replicas report their queues every `report_s` seconds, as real ones do; between two reports
the router relies on what it has sent itself.
"""

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, Protocol, final

from benchmarks.fleet_sessions import AgentSession, Turn, first_turn
from benchmarks.simulated_replicas import FinishedTurn, SimulatedReplica
from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.replica_load import ReplicaState
from jinfercept.fleet.routing import Router
from jinfercept.meter.turns import LatencyLimits
from jinfercept.sched.profile import Profile

REPORT_S = 1.0
"""Seconds between two reports of a replica."""


class RoutingPolicy(Protocol):
    """Chooses the replica of a request."""

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> int:
        """The replica's place among `replicas`."""
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

    def choose(self, hint: RoutingHint, replicas: tuple[ReplicaState, ...], now: float) -> int:
        return int(self._router.route(hint, replicas, now).replica)

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
        turns: that were sent; the rest of the report is of them.
        unfinished: of them, at the end of the run.
        good_share: of the turns, within the limits; unfinished ones are not.
        goodput_per_s: turns within the limits, over the seconds.
        found_share: of the prompt tokens, not recomputed.
        known_share: of the prompt tokens that some replica had computed before, not recomputed.
        home_share: of the follow-ups, sent to the replica of the turn before.
        first_token_s, turn_s: mean, median and 99th percentile, of the time from a turn's sending to its first and last token.
        busiest_share: of the turns, at the replica with the most.
        seconds: of the simulated clock.
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
    busiest_share: float
    seconds: float


@dataclass(slots=True)
class _Counts:
    """Sums of a run."""

    first_s: array
    turn_s: array
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
) -> ClusterReport:
    """Play sessions until all have ended or `most_s` seconds have passed.

    Args:
        replicas: fresh ones.
        sessions: in the order of their starts.
        most_s: seconds after which the rest is unfinished.
    """
    states = tuple(ReplicaState(str(place)) for place in range(len(replicas)))
    counts = _Counts(array("f"), array("f"))
    placed = Counter[int]()
    follow_ups: list[tuple[float, int, Turn]] = []
    events, queued_s = list[tuple[float, int]](), [math.inf] * len(replicas)
    sent: dict[tuple[int, int], RoutingHint] = {}
    homes: dict[int, int] = {}
    coming, now = iter(sessions), 0.0
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
        place = policy.choose(hint, states, now)
        placed[place] += 1
        sent[turn.session.number, turn.number] = hint
        counts.num_follow_ups += turn.number > 0
        counts.num_home += homes.get(turn.session.number) == place
        homes[turn.session.number] = place
        replicas[place].submit(turn, now)
        look_at(place)
    return _report(counts, placed, now)


def _report(counts: _Counts, placed: Counter[int], seconds: float) -> ClusterReport:
    turns = placed.total()
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
        busiest_share=max(placed.values(), default=0) / max(1, turns),
        seconds=seconds,
    )


def _spread(values: array) -> tuple[float, float, float]:
    """Mean, median and 99th percentile; zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return (0.0, 0.0, 0.0)
    return fmean(ordered), ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
