"""Across architectures: the best policy for pauses, the best steps and swap budgets, and the price of a wrong profile."""

from collections.abc import Mapping, Sequence

from jinfercept.sim.run_stats import Report
from jinfercept.sim.tables import TextTable
from studies.answer import StudyAnswer, StudyEffort
from studies.questions.architecture_trials import (
    ANOTHER,
    BELIEVED_INSTEAD,
    BUDGETS,
    LOAD,
    PLANNERS,
    POLICIES,
    STEP_TOKENS,
    TRUE,
    WRONG,
    Trial,
    compute_variant,
    first_of_each,
    link_variant,
    runs,
    step_variant,
)
from studies.questions.latency_grid import LatencyGrid, mean_ms
from studies.questions.machines import DEPLOYMENTS, Deployment, mixed_demand
from studies.questions.steady_state import Demand, paper_rates

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
        lead = mean_ms(policies.rows[deployment.label][others[0]]) / mean_ms(policies.rows[deployment.label][first]) - 1
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
    ratios = {name: mean_ms(row[other]) / mean_ms(row[ours]) for name, row in policies.rows.items()}
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
