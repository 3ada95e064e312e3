"""Across architectures: the best policy for pauses, the best steps and swap budgets, and the price of a wrong profile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jinfercept.sched.profile import Profile
from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_3_70B, LLAMA_13B
from jinfercept.sim.run_stats import Report
from jinfercept.sim.sweep import SweepRun
from jinfercept.sim.tables import TextTable
from studies.answer import StudyAnswer, StudyEffort
from studies.questions.latency import LatencyGrid, mean_token_ms
from studies.questions.steady_state import (
    DEPLOYMENTS,
    LLAMA_3_8B,
    Demand,
    Deployment,
    deployed,
    mixed_demand,
    mixed_load,
    paper_rates,
)

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
    "llama-2-7b, A40": deployed(LLAMA_2_7B, "H100"),
    "llama-13b, H100": deployed(LLAMA_13B, "L40S", 2),
    "llama-3-70b, B200": deployed(LLAMA_3_70B, "A100-80GB", 4),
    "llama-3-8b, TPU-v6e": deployed(LLAMA_3_8B, "T4", 2),
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


Reports = Mapping[Trial, Report]


def ask(effort: StudyEffort) -> StudyAnswer:
    """Simulate the deployments; tables, and heat maps of latency over the best one of each row."""
    need = mixed_demand()
    sweep_runs = runs(need, effort.seed, quick=effort.quick)
    reports = dict(zip(sweep_runs, effort.play(list(sweep_runs.values())), strict=True))
    simulated = [
        deployment for deployment in DEPLOYMENTS if any(trial.deployment == deployment.label for trial in sweep_runs)
    ]
    varied = [deployment for deployment in first_of_each() if deployment in simulated]
    misled = [deployment for deployment in simulated if deployment.label in BELIEVED_INSTEAD]
    policies = LatencyGrid(
        "Policies",
        ("deployment", "policy"),
        POLICIES,
        {
            deployment.label: _row(reports, deployment, {policy: (TRUE, policy) for policy in POLICIES})
            for deployment in simulated
        },
    )
    steps, budgets, wrong = _steps(varied, reports), _budgets(varied, reports), _wrong(misled, reports)
    grids = (policies, steps, budgets, wrong)
    return StudyAnswer(
        "Which strategy wins on which machine, with which steps and swap budgets, and what does a wrong profile cost?",
        [_deployments(simulated, need, policies), *(grid.table() for grid in grids)],
        [*_about_policies(simulated, need, policies), *map(_about_one_for_all, (steps, budgets)), *_about_wrong(wrong)],
        [[policies.heat_map(), steps.heat_map()], [budgets.heat_map(), wrong.heat_map()]],
        [report | trial._asdict() for trial, report in reports.items()],
    )


def _row(reports: Reports, deployment: Deployment, columns: Mapping[str, tuple[str, str]]) -> dict[str, Report]:
    """The reports of a deployment by column, from the variant and the policy of each column."""
    trials = {column: Trial(deployment.label, *trial) for column, trial in columns.items()}
    return {column: reports[trial] for column, trial in trials.items() if trial in reports}


def _steps(varied: Sequence[Deployment], reports: Reports) -> LatencyGrid:
    columns = {"S": (TRUE, "copy_ahead")} | {str(size): (step_variant(size), "copy_ahead") for size in STEP_TOKENS}
    rows = {
        f"{deployment.label} (S = {deployment.profile.saturation})": _row(reports, deployment, columns)
        for deployment in varied
    }
    return LatencyGrid("Steps, copy_ahead", ("deployment", "query tokens per step"), list(columns), rows)


def _budgets(varied: Sequence[Deployment], reports: Reports) -> LatencyGrid:
    shares = sorted([*BUDGETS, 1.0])
    columns = {f"{share:g}": (TRUE if share == 1.0 else link_variant(share), "copy_ahead") for share in shares}
    rows = {deployment.label: _row(reports, deployment, columns) for deployment in varied}
    return LatencyGrid(
        "Swap budget, copy_ahead", ("deployment", "budget over what the link moves"), list(columns), rows
    )


def _wrong(misled: Sequence[Deployment], reports: Reports) -> LatencyGrid:
    variants = [TRUE, *map(link_variant, WRONG), *map(compute_variant, WRONG), ANOTHER]
    rows = {
        f"{deployment.label}, {policy}": row
        for deployment in misled
        for policy in PLANNERS
        if (row := _row(reports, deployment, {variant: (variant, policy) for variant in variants}))
    }
    return LatencyGrid("Wrong profile", ("deployment, policy", "believed"), variants, rows, base=TRUE)


def _deployments(simulated: Sequence[Deployment], need: Demand, policies: LatencyGrid) -> TextTable:
    """The machines, their load, and who wins."""
    columns = [
        "deployment",
        "KV per token",
        "pool, tokens",
        "S",
        "requests/s",
        "first token within",
        "per token within",
    ]
    columns += ["paused contexts over pool", "best policies (within 2 %)", "lead of the first"]
    rows = []
    for deployment in simulated:
        profile, limits, (first, *others) = (
            deployment.profile,
            deployment.limits(need),
            policies.ranked(deployment.label),
        )
        lead = (
            mean_token_ms(policies.rows[deployment.label][others[0]])
            / mean_token_ms(policies.rows[deployment.label][first])
            - 1
        )
        rows.append(
            [
                deployment.label,
                f"{profile.kv_bytes_per_token / 1024:g} KiB",
                f"{deployment.kv_tokens:,}",
                str(profile.saturation),
                f"{LOAD * deployment.full_rate(need):.2f}",
                f"{limits.first_token_s:.1f} s",
                f"{1e3 * limits.per_token_s:.0f} ms",
                f"{_paused(deployment, need):.2f}",
                ", ".join(policies.as_good(deployment.label)),
                f"{lead:.1%}",
            ]
        )
    return TextTable(f"Deployments at {LOAD:g} of the load that they carry on paper.", columns, rows)


def _paused(deployment: Deployment, need: Demand) -> float:
    """Tokens of paused contexts at the load of the study, over those of the pool."""
    return LOAD * deployment.full_rate(need) * need.paused_token_s / deployment.kv_tokens


def _about_policies(simulated: Sequence[Deployment], need: Demand, policies: LatencyGrid) -> list[str]:
    wins = {
        policy: [deployment for deployment in simulated if policy in policies.as_good(deployment.label)]
        for policy in POLICIES
    }
    counts = ", ".join(f"{policy} on {len(won)}" for policy, won in wins.items())
    sentences = [f"Within 2 % of the best of {len(simulated)} deployments: {counts}."]
    kept = [_paused(deployment, need) for deployment in wins["preserve"]]
    full = [_paused(deployment, need) for deployment in simulated if deployment not in wins["preserve"]]
    if kept:
        sentences.append(
            f"preserve is as good as the best where paused contexts would fill {min(kept):.2f} to {max(kept):.2f} pools."
        )
    if full:
        sentences.append(f"preserve is worse than that where they would fill {min(full):.2f} to {max(full):.2f} pools.")
    rates = [
        paper_rates(deployment.profile, need, deployment.kv_tokens, deployment.profile.saturation)
        for deployment in simulated
    ]
    least, most = (end(paper.dropped / paper.free for paper in rates) for end in (min, max))
    sentences.append(
        f"On paper, an engine that drops every context carries {least:.2f} to {most:.2f} of one whose pauses cost nothing."
    )
    return sentences + [_compared(policies, other, "copy_ahead") for other in POLICIES if other != "copy_ahead"]


def _compared(policies: LatencyGrid, other: str, ours: str) -> str:
    ratios = {name: mean_token_ms(row[other]) / mean_token_ms(row[ours]) for name, row in policies.rows.items()}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return (
        f"{other} takes {ratios[least]:.3f} ({least}) to {ratios[most]:.3f} ({most}) times the mean latency of {ours}."
    )


def _about_one_for_all(grid: LatencyGrid) -> str:
    """What each column costs at worst over the best one of the row."""
    worst = {column: worst_there for column in grid.columns if (worst_there := grid.worst(column))}
    told = ", ".join(f"{column}: {ratio:.2f} ({row})" for column, (ratio, row) in worst.items())
    return f"{grid.title}: the mean latency of each over the best one, where it is worst: {told}."


def _about_wrong(wrong: LatencyGrid) -> list[str]:
    sentences = []
    for policy in PLANNERS:
        rows = {name: row for name, row in wrong.rows.items() if name.endswith(f", {policy}")}
        worst = {
            column: worst_there for column in wrong.columns if (worst_there := wrong._replace(rows=rows).worst(column))
        }
        told = ", ".join(f"{column}: {ratio:.2f}" for column, (ratio, _) in worst.items() if column != TRUE)
        if told:
            sentences.append(
                f"{policy} with a wrong profile takes at most so many times the latency with the true one: {told}."
            )
    if wrong.rows:
        taken = "; ".join(f"{name}, for {other.label}" for name, other in BELIEVED_INSTEAD.items())
        sentences.append(f"Taken for the other machine: {taken}.")
    return sentences
