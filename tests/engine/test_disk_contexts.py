"""Contexts on a simulated disk: what is read, what is not worth it, and what becomes of requests that wait for it."""

from dataclasses import replace

import pytest

from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError
from jinfercept.events import Event, Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.scripted import ScriptedDispatcher, make_request, plain_tokens
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.simulator import VirtualClock
from jinfercept.sim.workload import Script, Segment
from tests.support.engine_requests import ask, served, settle

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


def test_contexts_that_return_at_once_are_all_read() -> None:
    engine = simulated()
    prompts = [list(range(first, first + 330)) for first in range(1000, 4000, 500)]
    for number, prompt in enumerate(prompts):
        served(engine, ask(f"first {number}", prompt, follow_up=FollowUp()))
        settle(engine)
    engine.reset_prefix_cache()
    requests = [
        replace(ask(f"again {number}", [*prompt, 7]), tenant=str(number % 2)) for number, prompt in enumerate(prompts)
    ]
    outputs = served(engine, *requests, ask("new", [5] * 40, max_tokens=1))
    assert [output.num_cached_tokens for output in outputs] == [*(320 for _ in prompts), 0]
    assert engine.disk is not None
    assert engine.disk.read_tokens == 320 * len(prompts)
    engine.check_pages()


def test_sequences_that_a_policy_turns_away_are_read_and_start_at_last() -> None:
    engine = simulated()
    forgets(engine)
    engine.scheduler._policy.admits = lambda sequence, now: False  # pyright: ignore[reportPrivateUsage]
    [output] = served(engine, ask("again", [*PROMPT, 7]))
    assert output.num_cached_tokens == 320


@pytest.mark.parametrize("lost", [range(75), range(50, 75), range(30, 60)])
def test_a_request_whose_call_returns_reads_the_pages_that_it_has_lost_and_no_others(lost: range) -> None:
    engine = simulated()
    script = Script("math", 1200, (Segment(5, 100.0, 40), Segment(5, None, 0)))
    engine.submit(make_request(7, script, plain_tokens))
    while not engine.scheduler.intercepted:
        engine.step()
    [sequence] = engine.scheduler.intercepted.values()
    while sequence.context.num_stored < 75:
        engine.step()
    engine.scheduler.kv.copies.drop(sequence.context, lost, device=True, host=True)
    [output] = [event.output for event in run(engine) if isinstance(event, Finished)]
    assert engine.disk is not None
    assert engine.disk.read_tokens == 16 * len(lost)
    assert output.metrics.recomputed_tokens < 16
    engine.check_pages()


def run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        engine.check_pages()
    return events


def test_a_full_host_gives_up_pages_of_contexts_that_are_expected_later_for_those_that_are_read() -> None:
    engine = simulated()
    forgets(engine)
    kv = engine.scheduler.kv
    scripts = [Script("math", 1590, (Segment(1, 1e5, 0), Segment(1, None, 0))) for _ in range(2)]
    for number, script in enumerate(scripts):
        engine.submit(make_request(number, script, plain_tokens))
    while len(engine.scheduler.intercepted) < 2 or kv.num_host_free >= 20:
        engine.step()
    [output] = served_beside(engine, ask("again", [*PROMPT, 7, 8]))
    assert output.num_cached_tokens == 320
    engine.check_pages()


def served_beside(engine: Engine, request: Request) -> list[RequestOutput]:
    """The outputs of a step in which a request ends."""
    engine.submit(request)
    while True:
        ended = [event.output for event in engine.step() if isinstance(event, Finished)]
        if ended:
            return ended


def test_a_host_without_room_takes_the_leading_pages() -> None:
    engine = simulated()
    forgets(engine)
    kv = engine.scheduler.kv
    others = kv.open("others")
    num_taken = len(kv.copies.adopt(others, list(range(3200)), 195))
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
    with pytest.raises(ConfigError, match="no speed of a disk"):
        Simulation(load_profile("paper-gptj-6b-a100"), "lru", disk_tokens=100, prefix_caching=True)
    with pytest.raises(ConfigError, match="host tier"):
        Simulation(H100, "lru", disk_tokens=100, host_tokens=0, prefix_caching=True)


def test_a_paused_context_is_written_though_a_running_one_has_its_beginning() -> None:
    engine = simulated()
    engine.submit(ask("runs", PROMPT, max_tokens=900))
    while not engine.scheduler.running:
        engine.step()
    engine.submit(ask("ends", [*PROMPT, *range(320)], max_tokens=1, follow_up=FollowUp()))
    while not engine.scheduler.intercepted:
        engine.step()
    [sequence] = engine.scheduler.intercepted.values()
    while engine.scheduler.running and sequence.context.num_stored < 40:
        engine.step()
    assert engine.scheduler.running, "the context is written meanwhile"
    engine.check_pages()
