"""A scheduler without an engine: tests add requests, return calls and inspect plans one by one."""

from collections.abc import Callable, Iterable, Iterator
from typing import final

from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.kv.side_pool import NO_SIDES, SideSizes
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.orders import Order
from jinfercept.sched.plan import StepPlan
from jinfercept.sched.plan_builder import PlannedStep
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy, swap
from jinfercept.sched.scheduler import Scheduler, SchedulerLimits
from jinfercept.sched.sequence import Sequence
from jinfercept.sched.transfers import Preemption
from tests.support.fake_engine import VOCAB, AffineCost, FakeRunner


class Scripted(Policy):
    """`swap`, but every page of a paused context goes where `placement` says."""

    synchronous = True

    def __init__(self, placement: Callable[[Sequence, int], Residency]) -> None:
        self._placement, self._swap = placement, swap()
        self._fresh: dict[str, tuple[Sequence, list[Residency]]] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self._swap.pause(sequence, now)
        places = [self._placement(sequence, index) for index in range(sequence.context.num_pages)]
        self._fresh[sequence.id] = sequence, places

    def resume(self, sequence: Sequence, now: float) -> None:
        self._swap.resume(sequence, now)
        self._fresh.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        for sequence, places in self._fresh.values():
            for index, place in enumerate(places):
                if place is not Residency.DIRTY:
                    mover.move(sequence, _ACTIONS[place], "paused", range(index, index + 1))
        self._fresh.clear()

    def victims(self, now: float) -> Iterator[Move]:
        return self._swap.victims(now)

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return self._swap.host_victims(sequence, now)


_ACTIONS = {Residency.CLEAN: Action.COPY, Residency.HOST: Action.SWAP, Residency.MISSING: Action.LOSE}

SIZE = 4


class SchedulerBench:
    """A scheduler, its runner, and the results in between, as an engine handles them (without calls)."""

    def __init__(
        self,
        policy: Policy,
        *,
        num_pages: int = 100,
        num_host_pages: int = 100,
        buckets: tuple[int, ...] = (4, 16),
        max_num_seqs: int = 4,
        chunk_tokens: int = 1 << 30,
        link_tokens_per_s: float = 1e9,
        per_query_s: float = 0.0,
        depth: int = 0,
        preemption: Preemption = "policy",
        order: Order | None = None,
        check: bool = True,
        states: SideSizes = NO_SIDES,
    ) -> None:
        self.kv = KVManager(num_pages, num_host_pages, SIZE, sides=states)
        self.scheduler = Scheduler(
            self.kv,
            policy,
            AffineCost(fixed_s=1.0, per_query_s=per_query_s, link_tokens_per_s=link_tokens_per_s),
            ElapsedEstimator(),
            SchedulerLimits(buckets, max_num_seqs, num_pages * SIZE, chunk_tokens, preemption=preemption),
            order=order,
        )
        self.runner = FakeRunner(SIZE, buckets, has_states=bool(states.num_slots))
        self.depth = depth
        self.in_flight: list[tuple[PlannedStep, tuple[int, ...]]] = []
        self.num_wasted = 0
        self.check = check  # the pages, after every step
        self.now_s = -1.0  # a second passes from plan to plan

    def add(self, name: str, num_tokens: int, max_tokens: int = 8, tenant: str = "", weight: float = 1.0) -> Sequence:
        """A sequence of its own tokens: nothing is shared."""
        tokens = [(len(name) * 31 + ord(name[0]) + i * i) % VOCAB for i in range(num_tokens)]
        sequence = Sequence(name, tokens, self.kv.open(), max_tokens=max_tokens, tenant=tenant, weight=weight)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """A plan, executed; and the result that is due."""
        self.now_s += 1.0
        planned = self.scheduler.plan(self.now_s)
        if planned.plan:
            self.in_flight.append((planned, self.runner.submit(planned.plan).tokens))
        if self.in_flight and (len(self.in_flight) > self.depth or not planned.plan):
            self.apply(*self.in_flight.pop(0))
        if self.check:
            self.kv.check([sequence.context for sequence in self.scheduler.unfinished])
        return planned.plan

    def apply(self, planned: PlannedStep, tokens: tuple[int, ...]) -> None:
        for (sequence, epoch, *_), token in zip(planned.sampled, tokens, strict=True):
            if sequence.epoch != epoch:
                self.num_wasted += 1
                continue
            self.scheduler.accept(sequence, token)
            if sequence.generated == sequence.max_tokens:
                self.scheduler.finish(sequence, 0.0)

    def steps(self, number: int) -> list[StepPlan]:
        return [self.step() for _ in range(number)]

    def drain(self) -> list[StepPlan]:
        """Everybody who runs or waits, to the end."""
        plans = []
        while self.scheduler.running or self.scheduler.waiting or self.in_flight:
            plans.append(self.step())
            assert len(plans) < 2000, "starved"
        return plans

    def prefilled(self, name: str, num_tokens: int, max_tokens: int = 8) -> Sequence:
        """A sequence that decodes."""
        sequence = self.add(name, num_tokens, max_tokens)
        while sequence.generated == 0:
            self.step()
        return sequence

    def paused(self, name: str, num_tokens: int) -> Sequence:
        sequence = self.prefilled(name, num_tokens)
        self.scheduler.intercept(sequence, 0.0)
        return sequence


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.id for sequence in sequences]


def residencies(sequence: Sequence) -> list[Residency]:
    return [run.residency for run in sequence.context.runs() for _ in run.pages]


@final
class CopyEverything(Policy):
    """Copies every page of every paused request, as the link allows, and drops none before it must."""

    requeues_at_tail = False
    protects_paused = False
    synchronous = False

    def __init__(self) -> None:
        self.paused: dict[str, Sequence] = {}

    def pause(self, sequence: Sequence, now: float) -> None:
        self.paused[sequence.id] = sequence

    def wait(self, sequence: Sequence) -> None:
        pass

    def resume(self, sequence: Sequence, now: float) -> None:
        self.paused.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        for sequence in self.paused.values():
            for run in sequence.context.runs():
                mover.copy(sequence, "ahead", run.pages)

    def victims(self, now: float) -> Iterator[Move]:
        for sequence in list(self.paused.values()):
            yield Move(sequence, sequence.context.tail_first, Action.SWAP, "a slot is needed")

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return iter(())
