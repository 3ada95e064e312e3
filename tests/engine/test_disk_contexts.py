"""Contexts on a simulated disk: what is read, what is not worth it, and what becomes of requests that wait for it."""

from dataclasses import replace

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError
from jinfercept.events import Finished
from jinfercept.request import FollowUp
from jinfercept.sched.profile import load_profile
from jinfercept.sim.scripted import ScriptedDispatcher, plain_tokens
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.simulator import VirtualClock
from tests.support.retained_contexts import ask, served, settle

H100 = load_profile("roofline-llama-3-8b-h100-attention")
PROMPT = list(range(1000, 1330))


def simulated(read_tokens_per_s: float = 1e6) -> Engine:
    simulation = Simulation(
        replace(H100, disk_read_tokens_per_s=read_tokens_per_s),
        "copy_ahead",
        kv_tokens=3200,
        host_tokens=3200,
        disk_tokens=6400,
        prefix_caching=True,
        max_model_len=1600,
    )
    clock = VirtualClock()
    return simulation.open_engine(clock, ScriptedDispatcher(clock, plain_tokens)).engine


def forgets(engine: Engine) -> None:
    """Serve the prompt and keep its context, then lose everything that is in memory."""
    served(engine, ask("first", PROMPT, follow_up=FollowUp()))
    settle(engine)
    engine.reset_prefix_cache()


@pytest.mark.parametrize(("read_tokens_per_s", "num_cached"), [(1e6, 320), (1e4, 0)])
def test_a_prefix_on_disk_is_read_where_that_takes_less_time(read_tokens_per_s: float, num_cached: int) -> None:
    engine = simulated(read_tokens_per_s)
    forgets(engine)
    [output] = served(engine, ask("again", [*PROMPT, 7, 8]))
    assert output.num_cached_tokens == num_cached
    engine.check_pages()


def test_a_host_without_room_takes_the_leading_pages() -> None:
    engine = simulated()
    forgets(engine)
    kv = engine.scheduler.kv
    others = kv.open("others")
    num_taken = len(kv.adopt(others, list(range(3200)), 195))
    [output] = served(engine, ask("again", [*PROMPT, 7, 8]))
    assert num_taken == 195
    assert output.num_cached_tokens == 80
    kv.close(others)
    engine.check_pages()


def test_a_request_that_waits_for_the_disk_holds_up_no_other_and_can_be_aborted() -> None:
    engine = simulated()
    forgets(engine)
    engine.submit(ask("waits", [*PROMPT, 7]))
    engine.submit(ask("other", [5] * 40, max_tokens=1))
    ended = [event for event in engine.step() if isinstance(event, Finished)]
    assert [event.request_id for event in ended] == ["other"]
    assert engine.num_waiting == 1
    engine.abort("waits")
    [aborted] = [event for event in engine.step() if isinstance(event, Finished)]
    assert aborted.output.outputs[0].finish_reason == "abort"
    assert not engine.has_work
    engine.check_pages()
    engine.submit(ask("waits", [*PROMPT, 7]))
    engine.step()
    engine.close()
    engine.check_pages()


def test_a_simulated_disk_needs_its_prices_and_a_host() -> None:
    with pytest.raises(ConfigError, match="no disk"):
        Simulation(load_profile("paper-gptj-6b-a100"), "lru", disk_tokens=100, prefix_caching=True)
    with pytest.raises(ConfigError, match="host tier"):
        Simulation(H100, "lru", disk_tokens=100, host_tokens=0, prefix_caching=True)
