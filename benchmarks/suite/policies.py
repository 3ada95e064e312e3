"""Policies in real time, on one model: the six of the paper and ours on a scaled mixed workload, and the default of
`jinfercept serve` beside least recently used pages with a host tier on scaled sessions of agents. Rows: replay's reports.

Also `workload` (its sizes), `served`, and `other_tokens`: requests whose tokens are not those of the first policy (in
bfloat16 a step's shape may decide a near tie, so that a few may differ). Rows of agents have `order` too, and `turns`, those
that count: `session`, `turn`, `submitted_s`, `delay_s`, tokens that are `new` and that were `lost`, and whether it `finished`;
`other_tokens` of them counts turns that both served, whose prompts differ once an answer does. Behind them stands a row for
each contender with `simulated`, the report of the simulator with the profile that was measured.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from random import Random

from benchmarks.replay import Replayed, different, random_tokens, replay, resize_host, simulation
from benchmarks.suite.scaled import scaled, scaled_sessions
from benchmarks.suite.sizes import GIB, Agents, Policies, Row, Sizes
from jinfercept.models.config import ModelConfig
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.sim.agent_sessions import fitting, load_sessions
from jinfercept.sim.scripted import NUMBERS, SessionLoad, TurnRecord, make_request
from jinfercept.sim.workload import arrivals, draw
from jinfercept.start.start import EngineSetup, set_up

SEED = 1
"""Of the sessions' order and times."""

CONTENDERS = (("copy_ahead", "missing_work"), ("lru_host", "missing_work"), ("lru_host", "fcfs"))
"""Policies and orders: what users get, another policy in the same order, and that policy as other engines serve it."""
POLICIES = ("copy_ahead", "min_waste", "discard", "swap", "improved_discard", "preserve")


def rows(sizes: Sizes) -> Iterator[Row]:
    """Replay all policies, one after the other."""
    load = sizes.policies
    config = sizes.models[load.model]
    rng = Random(0)
    drawn = arrivals(lambda: draw("mixed", rng), load.rate, load.duration_s, rng)
    write = random_tokens(config.vocab_size, 0)
    requests = [
        (at_s, make_request(number, script, write))
        for number, (at_s, script) in enumerate(scaled(drawn, load.scale_tokens, load.scale_time))
    ]
    duration_s = load.duration_s * load.scale_time
    first: Replayed | None = None
    with closing(_set_up(sizes, load, config)) as setup:
        for policy in POLICIES:
            run = replay(setup, policy, requests, write, duration_s)
            first = first or run
            yield run.report | _common(load, run, first) | {"workload": load._asdict() | {"requests": len(requests)}}


def agent_rows(sizes: Sizes) -> Iterator[Row]:
    """Replay sessions under all contenders, the same ones for each; last what the simulator says of them."""
    load = sizes.agents
    config = replace(sizes.models[load.model], max_position=load.max_model_len)
    sessions = fitting(scaled_sessions(load_sessions("agents"), load.scale_tokens, load.scale_time), load.max_model_len)
    played = SessionLoad(sessions, SEED, load.live, duration_s=load.duration_s, ramp_s=load.warm_up_s)
    write, runs = random_tokens(config.vocab_size, 0), list[Replayed]()
    with closing(_set_up(sizes, load, config)) as setup:
        setups = [setup.changed(order=order) for _, order in CONTENDERS]
        for (policy, order), ordered in zip(CONTENDERS, setups, strict=True):
            run = replay(ordered, policy, played, write, load.duration_s, warm_up_s=load.warm_up_s)
            runs.append(run)
            turns = [_turn(turn) for turn in run.turns if turn.submitted_s >= load.warm_up_s]
            yield run.report | _common(load, run, runs[0]) | {"order": order, "turns": turns}
        for (policy, order), ordered, run in zip(CONTENDERS, setups, runs, strict=True):
            simulated = simulation(ordered, policy, load.duration_s, run.report["host_s"])
            simulated = replace(simulated, drain_s=0.0, warm_up_s=load.warm_up_s)
            yield {"policy": policy, "order": order, "simulated": simulated.run(played)}


def _turn(turn: TurnRecord) -> Row:
    """A turn; its session is that with which its sub-agents count."""
    row: Row = {"session": turn.session // NUMBERS, "turn": turn.turn, "submitted_s": turn.submitted_s}
    return row | {"delay_s": turn.delay_s, "new": turn.new, "lost": turn.lost, "finished": turn.finished}


def _set_up(sizes: Sizes, load: Policies | Agents, config: ModelConfig) -> EngineSetup:
    host_bytes = load.host_tokens * kv_bytes_per_token(config, sizes.dtype)
    setup = set_up(
        config,
        load_format="dummy",
        profile="quick",
        dtype=sizes.dtype,
        page_size=sizes.page_size,
        kv_tokens=load.kv_tokens,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=load.bucket,
        swap_space=host_bytes / GIB,
    )
    return resize_host(setup, load.host_tokens)


def _common(load: Policies | Agents, run: Replayed, first: Replayed) -> Row:
    return {
        "model": load.model,
        "workload": load._asdict(),
        "served": len(run.streams),
        "other_tokens": len(different(run.streams, first.streams)),
    }
