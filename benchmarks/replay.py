"""A workload in real time against the real engine, and the same in the simulator: one report each, from the same code.

Prompts and results are random tokens, lengths are forced, calls are scripted; model, pages, transfers and clock are real. No
tokenizer takes part.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple, final

from jinfercept.engine.dispatcher import RealClock
from jinfercept.engine.engine import Engine
from jinfercept.engine.lifecycle import RequestLifecycle
from jinfercept.engine.meter.counts import LIMITS
from jinfercept.engine.meter.ledger import Prices
from jinfercept.engine.meter.request_log import RequestLog
from jinfercept.request import Request
from jinfercept.runner.runner import ForwardTicket, ModelRunner, StepTicket
from jinfercept.sched.plan import Masks, StepPlan, StepResult
from jinfercept.sim.run_stats import Report, RunStats
from jinfercept.sim.scripted import (
    ScriptedDispatcher,
    SessionClients,
    SessionLoad,
    TurnRecord,
    Writer,
    drive,
    play,
)
from jinfercept.sim.simulation import Simulation
from jinfercept.start.start import EngineSetup

GIB = 1 << 30


def random_tokens(vocab_size: int, seed: int) -> Writer:
    """Writes random tokens below `vocab_size`, the same ones in every run with the same seed."""
    return lambda number, place, count: tuple(Random(f"{seed} {number} {place}").choices(range(vocab_size), k=count))


class Replayed(NamedTuple):
    """A run's report, the tokens after the prompt of every request that was served to its end, and the turns of sessions."""

    report: Report
    streams: Mapping[str, list[int]]
    turns: Sequence[TurnRecord]


@final
class TimedRunner:
    """A runner that measures this thread's processor seconds in it; the rest of an iteration's is the engine's own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def forward(self, plan: StepPlan) -> ForwardTicket:
        started_s = time.thread_time()
        ticket = self._runner.forward(plan)
        self.seconds += time.thread_time() - started_s
        return ticket

    def sample(self, forward: ForwardTicket, masks: Masks) -> StepTicket:
        started_s = time.thread_time()
        ticket = self._runner.sample(forward, masks)
        self.seconds += time.thread_time() - started_s
        return ticket

    def collect(self, ticket: StepTicket) -> StepResult:
        started_s = time.thread_time()
        result = self._runner.collect(ticket)
        self.seconds += time.thread_time() - started_s
        return result

    def reset(self) -> None:
        self._runner.reset()


def replay(
    setup: EngineSetup,
    policy: str,
    requests: Sequence[tuple[float, Request]] | SessionLoad,
    write: Writer,
    duration_s: float,
    warm_up_s: float = 0.0,
) -> Replayed:
    """Play requests in real time under a policy, on the weights and executables of an engine setup that serves nothing else.

    Args:
        requests: greedy ones, with the second at which each arrives, in order; or sessions.
        write: the tokens that calls return, and those of sessions.
        duration_s: seconds of arrivals; unfinished requests are aborted after as many seconds again, of live sessions at once.
        warm_up_s: turns of sessions that are submitted in these first seconds are in no delay, no latency and no goodput.

    Returns:
        A simulation's report, the requests' tokens, and the turns of sessions.
    """
    clock = RealClock()
    setup = setup.changed(policy=policy)
    config, shape, profile = setup.config, setup.shape, setup.profile
    serving = setup.serve()
    serving.dispatcher.close()  # the calls are scripted
    scheduler, log = serving.engine.scheduler, RequestLog(clock.now)
    prices = Prices(profile, shape.page_size, synchronous=False)
    accounts = RunStats(log, scheduler, prices, shape.buckets[-1], LIMITS)
    dispatcher = ScriptedDispatcher(clock, write)
    runner = TimedRunner(setup.runner)
    lifecycle = RequestLifecycle(scheduler, dispatcher, clock, vocab_size=setup.model.config.vocab_size)
    depth, check = config.advanced.pipeline_depth, config.advanced.check_pages
    engine = Engine(lifecycle, runner, threading.Event(), depth=depth, check=check)
    engine.observe(log)
    started_s, turns = time.thread_time(), list[TurnRecord]()
    try:
        with setup.settings():
            if isinstance(requests, SessionLoad):
                clients = SessionClients(requests, write, started_s=clock.now())
                lasted = drive(engine, dispatcher, clock, clients, most_s(requests, duration_s))
                pool = setup.memory_plan.kv_tokens
                report = accounts.session_report(clients, lasted, scheduler.counters, pool, warm_up_s)
                streams, turns = clients.streams, clients.records
            else:
                played = play(engine, dispatcher, clock, requests, most_s(requests, duration_s))
                report = accounts.report(played, requests, scheduler.counters, setup.memory_plan.kv_tokens)
                streams = {output.request_id: output.outputs[0].token_ids for output in played.outputs}
        host_s = (time.thread_time() - started_s - runner.seconds) / max(accounts.iterations, 1)
    finally:
        with setup.settings():
            engine.close()
            setup.runner.reset()
        assert not len(scheduler.unfinished), "a request is left behind"
    return Replayed({"policy": policy, "profile": profile.name, "host_s": host_s} | report, streams, turns)


def most_s(requests: Sequence[object] | SessionLoad, duration_s: float) -> float:
    """Seconds after which a replay ends: those of arrivals and as many again, of live sessions only the first."""
    return duration_s if isinstance(requests, SessionLoad) and requests.live else 2 * duration_s


def resize_host(setup: EngineSetup, host_tokens: int) -> EngineSetup:
    """The setup with a host pool of so many tokens, rounded down to pages; raises `ConfigError` if the machine has no room."""
    plan, size = setup.memory_plan, setup.shape.page_size
    return setup.changed(swap_space=(host_tokens * plan.token_bytes(size) + 0.5) / GIB)


def simulation(setup: EngineSetup, policy: str, duration_s: float, host_s: float) -> Simulation:
    """The simulation of what `replay` does with this setup.

    Args:
        host_s: seconds of the engine's own work per step, as `replay` reports them.
    """
    plan, shape, config = setup.memory_plan, setup.shape, setup.config
    return Simulation(
        setup.profile,
        policy,
        config.scheduling.estimator,
        duration_s,
        kv_tokens=plan.kv_tokens,
        host_tokens=plan.host_tokens,
        page_size=shape.page_size,
        max_num_seqs=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        buckets=shape.buckets,
        chunk_tokens=config.scheduling.max_chunk_tokens,
        prefix_caching=config.cache.enable_prefix_caching,
        depth=config.advanced.pipeline_depth,
        chunked_prefill=config.scheduling.chunked_prefill,
        preemption=config.scheduling.preemption,
        order=config.scheduling.order,
        overlaps=True,
        host_s=host_s,
    )


def different(streams: Mapping[str, list[int]], reference: Mapping[str, list[int]]) -> list[str]:
    """The requests, among those that both runs served, whose tokens differ."""
    return [name for name, stream in streams.items() if name in reference and stream != reference[name]]
