"""Contexts on a disk: what is read, what is not worth it, and what becomes of requests that wait for it."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from jinfercept.engine.disk_contexts import DiskContexts
from jinfercept.engine.dispatcher import Clock
from jinfercept.engine.engine import Engine
from jinfercept.events import Event, Finished
from jinfercept.kv.context import Context
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sched.profile import Profile
from jinfercept.sim.scripted import ScriptedDispatcher, make_request, plain_tokens
from jinfercept.sim.simulation import Simulation, VirtualClock
from jinfercept.sim.workload import Script, Segment
from tests.support.engine_requests import ask, served, settle

H100 = load_profile("roofline-llama-3-8b-h100-attention")
PROMPT = list(range(1000, 1330))


class Piece(NamedTuple):
    """Pages that will have been read at a second of the clock."""

    at_s: float
    key: int
    num_pages: int
    is_last: bool
    side: Sequence[int] = ()


class FakeDisk:
    """A `PageDisk` without data: reads take their seconds, one after the other, and writes none."""

    piece_pages = 32

    def __init__(self, profile: Profile, clock: Clock) -> None:
        self._profile, self._clock, self._free_s = profile, clock, 0.0
        self._stored: set[bytes] = set()
        self._pieces: list[Piece] = []
        self._ended: list[tuple[Context, int]] = []

    @property
    def num_writes(self) -> int:
        return len(self._ended)

    def num_stored(self, root: bytes, tokens: Sequence[int], most: int = 1 << 30) -> int:
        number = next(
            (number for number, prefix in enumerate(prefixes(root, tokens)) if prefix not in self._stored),
            len(tokens) // 16,
        )
        return min(number, most)

    def read(
        self, key: int, root: bytes, tokens: Sequence[int], first: int, num_pages: int, num_side_slots: int
    ) -> None:
        self._free_s = max(self._free_s, self._clock.now()) + self._profile.disk_s(16 * num_pages)
        sizes = [min(self.piece_pages, num_pages - start) for start in range(0, num_pages, self.piece_pages)]
        self._pieces += [Piece(self._free_s, key, size, False) for size in sizes[:-1]]
        self._pieces.append(Piece(self._free_s, key, sizes[-1], True))

    def cancel(self, key: int) -> None:
        self._pieces = [piece for piece in self._pieces if piece.key != key]

    def poll_read(self) -> list[Piece]:
        now = self._clock.now()
        ended = [piece for piece in self._pieces if piece.at_s <= now]
        self._pieces = self._pieces[len(ended) :]
        return ended

    def place(
        self,
        piece: Piece,
        slots: Sequence[int | None],
        dropped: Sequence[int],
        side_slots: Sequence[int],
        dropped_sides: Sequence[int],
    ) -> None:
        pass

    def write(
        self,
        key: Context,
        root: bytes,
        tokens: Sequence[int],
        first: int,
        slots: Sequence[int],
        side_slots: Sequence[int] = (),
    ) -> None:
        self._stored.update(list(prefixes(root, tokens))[first : first + len(slots)])
        self._ended.append((key, self.num_stored(root, tokens)))

    def poll_stored(self) -> list[tuple[Context, int]]:
        ended, self._ended = self._ended, []
        return ended

    def next_s(self) -> float | None:
        return self._clock.now() if self._ended else min((piece.at_s for piece in self._pieces), default=None)

    def close(self, longest_s: float) -> None:
        pass


def prefixes(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """The tokens up to the end of each full page."""
    return (root + array("q", tokens[:end]).tobytes() for end in range(16, len(tokens) + 1, 16))


def with_disk(read_tokens_per_s: float = 1e6) -> Engine:
    profile = replace(H100, disk_read_tokens_per_s=read_tokens_per_s)
    simulation = Simulation(
        profile, "copy_ahead", kv_tokens=3200, host_tokens=3200, prefix_caching=True, max_model_len=1600
    )
    clock = VirtualClock()
    engine, _ = simulation.open_engine(clock, ScriptedDispatcher(clock, plain_tokens))
    engine.disk = DiskContexts(engine.scheduler, FakeDisk(profile, clock), profile, profile.saturation)
    return engine


def forgets(engine: Engine) -> None:
    """Serve the prompt and keep its context, then lose everything that is in memory."""
    served(engine, ask("first", PROMPT, follow_up=FollowUp()))
    settle(engine)
    engine.reset_prefix_cache()


@pytest.mark.parametrize(("read_tokens_per_s", "num_cached"), [(1e6, 320), (1e4, 0)])
def test_a_prefix_on_disk_is_read_where_that_takes_less_time(read_tokens_per_s: float, num_cached: int) -> None:
    engine = with_disk(read_tokens_per_s)
    forgets(engine)
    [output] = served(engine, ask("again", [*PROMPT, 7, 8]))
    assert output.num_cached_tokens == num_cached
    engine.check_pages()


def test_contexts_that_return_at_once_are_all_read() -> None:
    engine = with_disk()
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
    engine = with_disk()
    forgets(engine)
    engine.scheduler._policy.admits = lambda sequence, now: False  # pyright: ignore[reportPrivateUsage]
    [output] = served(engine, ask("again", [*PROMPT, 7]))
    assert output.num_cached_tokens == 320


@pytest.mark.parametrize("lost", [range(75), range(50, 75), range(30, 60)])
def test_a_request_whose_call_returns_reads_the_pages_that_it_has_lost_and_no_others(lost: range) -> None:
    engine = with_disk()
    script = Script("math", 1200, (Segment(5, 100.0, 40), Segment(5, None, 0)))
    engine.submit(make_request(7, script, plain_tokens))
    while not engine.scheduler.intercepted:
        engine.step()
    [sequence] = engine.scheduler.intercepted.values()
    while sequence.context.num_stored < 75:
        engine.step()
    engine.scheduler.kv.drop(sequence.context, lost, device=True, host=True)
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
    engine = with_disk()
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
    engine = with_disk()
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
    engine = with_disk()
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


def test_a_paused_context_is_written_though_a_running_one_has_its_beginning() -> None:
    engine = with_disk()
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
