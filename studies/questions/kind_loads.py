"""Loads of one kind of InferCept's requests each, as comparable shares of what the machine could do without calls."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

from jinfercept.sched.profile import Profile
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import MIXED_WEIGHTS, Script, draw

KINDS: Sequence[str] = tuple(MIXED_WEIGHTS)
MIXED = "mixed"
NUM_DRAWS = 400


def full_rate(kind: str, profile: Profile, kv_tokens: int) -> float:
    """Requests per second that would fill the machine if their calls took no time: its compute or its device pool.

    In saturated steps, each of S query tokens in T_fwd(S): a request computes every token of its context once, and holds its
    context for a step per generated token.

    Args:
        kind: of the requests, or `MIXED`.
        kv_tokens: of the device pool.
    """
    rng, step_s = Random(0), profile.step_s(profile.saturation, 0)
    scripts = [draw(kind, rng) for _ in range(NUM_DRAWS)]
    compute_s = fmean(script.context for script in scripts) / profile.saturation * step_s
    held_s = fmean(map(_held_tokens, scripts)) * step_s / kv_tokens
    return 1.0 / max(compute_s, held_s)


def _held_tokens(script: Script) -> float:
    """Context tokens, summed over the steps that generate."""
    context, held_tokens = script.prompt, 0.0
    for segment in script.segments:
        held_tokens += segment.decode * (context + segment.decode / 2)
        context += segment.decode + segment.returned
    return held_tokens


def kind_load(
    kind: str, share: float, profile: Profile, kv_tokens: int, duration_s: float, seed: int
) -> SimulatedLoad[Sequence[Arrival]]:
    """Poisson arrivals of requests of a kind at a share of `full_rate`."""
    rng, rate = Random(seed), round(share * full_rate(kind, profile, kv_tokens), 3)
    return SimulatedLoad(kind, rate, seed, arrivals(lambda: draw(kind, rng), rate, duration_s, rng))
