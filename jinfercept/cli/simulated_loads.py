"""Requests that are drawn from traces or generated, for the commands that simulate or replay them. Imports no JAX."""

from collections.abc import Callable, Sequence
from random import Random

from jinfercept.errors import ConfigError
from jinfercept.sched.orders import ORDERS
from jinfercept.sched.plugins import check_name, is_place
from jinfercept.sched.policies import SETTINGS, check_choice
from jinfercept.sim.agent_sessions import ScriptedSession
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.distributions import Like
from jinfercept.sim.own_workload import OwnWorkload
from jinfercept.sim.session_clients import SessionLoad
from jinfercept.sim.simulation import BOUNDS
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import Script, from_trace, load_trace
from jinfercept.sim.workload import draw as draw_script

POLICY_NAMES = ", ".join((*SETTINGS, *BOUNDS))
ORDER_NAMES = ", ".join(ORDERS)


def check_policies(names: Sequence[str]) -> None:
    """Raise `ConfigError` unless all of these can be simulated: a policy, by name or place, or a bound."""
    for name in names:
        if is_place(name):
            check_choice(name)
        else:
            check_name("policy", name, SETTINGS | BOUNDS)


def drawer(
    trace: str | None, workload: str, like: Like, max_model_len: int
) -> Callable[[Random], Callable[[], Script]]:
    """How requests are drawn from a trace or, without one, generated.

    Raises:
        ConfigError: no such trace, workload (`OwnWorkload`) or statistics, or requests longer than `max_model_len`.
    """
    if trace is None and is_place(workload):
        return OwnWorkload(workload, max_model_len).drawer
    if trace is None:
        draw_script(workload, Random(0), like)
        return lambda rng: lambda: draw_script(workload, rng, like)
    scripts = load_trace(trace)
    longest = max(script.context for script in scripts)
    if longest >= max_model_len:
        raise ConfigError("the trace has a request that is too long", got=longest, fix=f"below {max_model_len} tokens")
    return lambda rng: from_trace(scripts, rng)


def load(
    workload: str,
    source: Callable[[Random], Callable[[], Script]],
    rate: float,
    duration: float,
    seed: int,
    burstiness: float = 1.0,
) -> SimulatedLoad[Sequence[Arrival]]:
    """Arrivals from a source. Raises `ConfigError` if rate, duration or burstiness are out of range."""
    rng = Random(seed)
    return SimulatedLoad(workload, rate, seed, arrivals(source(rng), rate, duration, rng, burstiness))


def session_loads(
    workload: str,
    sessions: Sequence[ScriptedSession],
    live: Sequence[int],
    rates: Sequence[float],
    seeds: Sequence[int],
    duration: float,
) -> list[SimulatedLoad[SessionLoad]]:
    """Loads of sessions, by numbers of live ones or, without any, by rates."""
    loads = [SessionLoad(sessions, seed, count, 0.0, duration) for count in live for seed in seeds]
    loads = loads or [SessionLoad(sessions, seed, 0, rate, duration) for rate in rates for seed in seeds]
    return [SimulatedLoad(workload, load.rate, load.seed, load) for load in loads]
