"""The simulations of the study of architectures: policies, sizes of steps, swap budgets, schedulers with a wrong profile."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.sched.profile import Profile
from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_3_70B, LLAMA_13B
from jinfercept.sim.sweep import SweepRun
from studies.questions.machines import DEPLOYMENTS, LLAMA_3_8B, Deployment, deployment, mixed_load
from studies.questions.steady_state import Demand

POLICIES = ("improved_discard", "preserve", "swap", "min_waste", "lru_host", "copy_ahead")
STEP_TOKENS = (128, 256, 512, 1024, 2048)
BUDGETS = (0.1, 0.25, 0.5, 2.0, 4.0)
"""Shares of the link that the scheduler plans to use."""
WRONG = (0.25, 4.0)
"""Believed speed over true speed."""
LOAD = 0.9
"""Of what a deployment carries on paper."""
TRUE = "the truth"
"""The variant without a change."""
ANOTHER = "other machine"
"""The variant whose scheduler is given the profile of another machine."""

BELIEVED_INSTEAD: Mapping[str, Deployment] = {
    "llama-2-7b, A40": deployment(LLAMA_2_7B, "H100"),
    "llama-13b, H100": deployment(LLAMA_13B, "L40S", 2),
    "llama-3-70b, B200": deployment(LLAMA_3_70B, "A100-80GB", 4),
    "llama-3-8b, TPU-v6e": deployment(LLAMA_3_8B, "T4", 2),
}
"""The deployments whose scheduler is given wrong profiles, and the one that it takes them for in `ANOTHER`."""
PLANNERS = ("min_waste", "copy_ahead")


class Trial(NamedTuple):
    """What distinguishes a simulation: where it runs, what is changed, and the policy."""

    deployment: str
    variant: str
    policy: str


def step_variant(tokens: int) -> str:
    """The name of the variant with steps of so many query tokens."""
    return f"steps of {tokens}"


def link_variant(times: float) -> str:
    """The name of the variant whose scheduler believes in a link so many times as fast, which is its swap budget too."""
    return f"link × {times:g}"


def compute_variant(times: float) -> str:
    """The name of the variant whose scheduler believes in so many times the operations per second."""
    return f"compute × {times:g}"


def with_link(profile: Profile, times: float) -> Profile:
    """The profile with so many times the tokens per second of the host link."""
    return replace(
        profile,
        link_out_tokens_per_s=profile.link_out_tokens_per_s * times,
        link_in_tokens_per_s=profile.link_in_tokens_per_s * times,
        link_both_tokens_per_s=profile.link_both_tokens_per_s * times,
    )


def with_compute(profile: Profile, times: float) -> Profile:
    """The profile with so many times the operations per second: S grows with them, reading weights takes as long as before."""
    return replace(
        profile,
        per_query_s=profile.per_query_s / times,
        per_pair_s=profile.per_pair_s / times,
        saturation=max(8, round(profile.saturation * times)),
    )


def first_of_each() -> list[Deployment]:
    """The first deployment of every accelerator."""
    firsts = dict[str, Deployment]()
    for placed in DEPLOYMENTS:
        firsts.setdefault(placed.profile.tables["derived"]["accelerator"], placed)
    return list(firsts.values())


def runs(need: Demand, seed: int, *, quick: bool) -> dict[Trial, SweepRun]:
    """The simulations by what distinguishes them; those of one deployment play the same arrivals.

    Args:
        need: of the mean request.
        seed: of the arrivals.
        quick: a few of one deployment, with a few seconds of arrivals.
    """
    made = dict[Trial, SweepRun]()
    for placed in DEPLOYMENTS[8:9] if quick else DEPLOYMENTS:
        rate = LOAD * placed.full_rate(need)
        duration_s = 6.0 if quick else min(200.0, max(80.0, 400.0 / rate))
        load = mixed_load(rate, duration_s, seed)
        for variant, policy, change in _variants(placed):
            if not quick or _is_quick(variant, policy):
                simulation = replace(placed.simulation(policy, duration_s, need), **change)
                made[Trial(placed.label, variant, policy)] = SweepRun(simulation, load)
    return made


def _variants(placed: Deployment) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The variants of a deployment, their policies, and what they change of the simulation."""
    for policy in POLICIES:
        yield TRUE, policy, {}
    varied, misled = placed in first_of_each(), placed.label in BELIEVED_INSTEAD
    if varied:
        for tokens in STEP_TOKENS:
            yield step_variant(tokens), "copy_ahead", {"buckets": tuple(range(1, tokens + 1))}
    for policy in PLANNERS:
        for times in BUDGETS if varied and policy == "copy_ahead" else WRONG if misled else ():
            yield link_variant(times), policy, {"believed": with_link(placed.profile, times)}
        if misled:
            for times in WRONG:
                yield compute_variant(times), policy, {"believed": with_compute(placed.profile, times)}
            yield ANOTHER, policy, {"believed": BELIEVED_INSTEAD[placed.label].profile}


def _is_quick(variant: str, policy: str) -> bool:
    return variant == TRUE or (policy == "copy_ahead" and variant in (step_variant(512), *map(link_variant, WRONG)))
