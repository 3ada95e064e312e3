"""Runs a policy through scenarios that policies fail in, on the real scheduler and engine, without a model and without time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, NamedTuple, Protocol, final

from jinfercept.errors import ConfigError, PluginError, describe_failure
from jinfercept.outputs import RequestOutput
from jinfercept.sched.conformance import has_members
from jinfercept.sched.guards import guard
from jinfercept.sched.plugins import label
from jinfercept.sched.policies import PolicyChoice, check_choice
from jinfercept.sched.policy import Action, Budget, Move, Mover, Policy
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.workload import Script, Segment
from jinfercept.testing.fake_runner import next_token
from jinfercept.testing.scenarios import FOLLOW_UP_TOKENS, NEVER, Scenario, ScenarioRun, hangs

MAX_STEPS = 4000
"""Steps of the engine after which requests of a scenario are taken to starve; the built-in policies need a tenth."""


class PolicyCheckError(AssertionError):
    """A policy breaks a rule of `Policy`."""


@final
class WatchedPolicy(Policy):
    """Passes everything on, and raises `PolicyCheckError` where a rule is broken.

    A sequence and its pages may not be written to, and an order of eviction ends only when every page was offered whose slot
    can be taken; pages that contexts share are the scheduler's.

    Attributes:
        problem: the first rule that was broken.
        num_moves: moves that were offered.
    """

    def __init__(self, policy: Policy, name: str) -> None:
        self.requeues_at_tail = policy.requeues_at_tail
        self.protects_paused = policy.protects_paused
        self.synchronous = policy.synchronous
        self.recomputes_late = policy.recomputes_late
        self.problem: PolicyCheckError | None = None
        self.num_moves = 0
        self._policy, self._name = policy, name
        self._known: dict[str, Sequence] = {}
        self._paused: dict[str, Sequence] = {}
        self._changes = 0
        self._shared: dict[str, set[int]] = {}  # indexes of pages that several contexts had, by sequence

    def pause(self, sequence: Sequence, now: float) -> None:
        self._known[sequence.id] = self._paused[sequence.id] = sequence
        self._changes += 1
        self._note_shared()
        self._unwritten("pause", lambda: self._policy.pause(sequence, now))

    def wait(self, sequence: Sequence) -> None:
        self._changes += 1
        self._unwritten("wait", lambda: self._policy.wait(sequence))

    def resume(self, sequence: Sequence, now: float) -> None:
        self._known[sequence.id] = sequence
        self._paused.pop(sequence.id, None)
        self._changes += 1
        self._note_shared()
        self._unwritten("resume", lambda: self._policy.resume(sequence, now))
        if sequence.state is State.FINISHED:
            self._known.pop(sequence.id)
            self._shared.pop(sequence.id, None)

    def moves(self, budget: Budget, now: float, mover: Mover) -> None:
        self._changes += 1
        watched = _WatchedMover(self, mover)
        self._policy.moves(budget, now, watched)
        self.compare(watched.before, "moves")

    def victims(self, now: float) -> Iterator[Move]:
        self._note_shared()
        changes = self._changes
        offered = {name: set(indexes) for name, indexes in self._shared.items()}
        for move in self._unwritten_each("victims", lambda: self._policy.victims(now)):
            offered.setdefault(move.sequence.id, set()).update(move.pages)
            yield move
        if changes != self._changes:
            return  # an order that was begun before the last pause need not know of it
        for sequence in self._paused.values():
            evictable = [run.pages for run in sequence.context.runs() if run.evictable]
            pages = set[int]().union(*evictable) - offered.get(sequence.id, set())
            if pages:
                doing = "waits for its calls" if sequence.state is State.INTERCEPTED else "waits to run"
                self._fail(
                    f"keeps page {min(pages)} of request {sequence.id}, which {doing}: `victims` ends without it, while a "
                    f"running request needs a slot; it must offer every page of every paused request in the end"
                )

    def host_victims(self, sequence: Sequence, now: float) -> Iterator[Move]:
        return self._unwritten_each("host_victims", lambda: self._policy.host_victims(sequence, now))

    def held_pages(self, most: int, now: float) -> int:
        return self._unwritten("held_pages", lambda: self._policy.held_pages(most, now))

    def admits(self, sequence: Sequence, now: float) -> bool:
        return self._unwritten("admits", lambda: self._policy.admits(sequence, now))

    def _note_shared(self) -> None:
        for sequence in self._paused.values():
            shared = self._shared.setdefault(sequence.id, set())
            for run in sequence.context.runs():
                if run.shared:
                    shared.update(run.pages)

    def states(self) -> "_States":
        """The fields of every sequence that the policy can see."""
        return [(sequence, _state_of(sequence)) for sequence in self._known.values()]

    def compare(self, before: "_States", method: str) -> None:
        """Raise `PolicyCheckError` if a sequence has another state than before."""
        for sequence, was in before:
            changed = [field for field, value in _state_of(sequence).items() if value != was[field]]
            if changed:
                self._fail(f"writes to request {sequence.id} in `{method}`: its {', '.join(changed)}; it may only read")

    def _unwritten[T](self, method: str, call: Callable[[], T]) -> T:
        before = self.states()
        answer = call()
        self.compare(before, method)
        return answer

    def _unwritten_each(self, method: str, call: Callable[[], Iterable[Move]]) -> Iterator[Move]:
        iterator = iter(self._unwritten(method, call))
        while (move := self._unwritten(method, lambda: next(iterator, None))) is not None:
            self.num_moves += 1
            yield move

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or PolicyCheckError(f"the policy {self._name} {problem}")
        raise self.problem


@final
class _WatchedMover(Mover):
    """Passes every move on, and looks at what the policy wrote since the one before.

    Attributes:
        before: states of the sequences after the last move.
    """

    def __init__(self, watch: WatchedPolicy, mover: Mover) -> None:
        self._watch, self._mover, self.before = watch, mover, watch.states()

    def move(self, sequence: Sequence, action: Action, why: str, pages: range | None = None) -> bool:
        self._watch.compare(self.before, "moves")
        self._watch.num_moves += 1
        moved = self._mover.move(sequence, action, why, pages)
        self.before = self._watch.states()
        return moved


type _States = list[tuple[Sequence, dict[str, object]]]


def _state_of(sequence: Sequence) -> dict[str, object]:
    """The fields of a sequence that a policy can see."""
    return {
        "state": sequence.state,
        "order": sequence.order,
        "tokens": len(sequence.tokens),
        "counts of tokens": (sequence.pending, sequence.generated, sequence.max_tokens),
        "calls": (sequence.calls, sequence.awaited, sequence.paused_s),
        "pages": sequence.context.runs(),
    }


class PolicyReport(NamedTuple):
    """The runs of a check.

    Attributes:
        policy: its name.
        num_plans: plans that were made.
    """

    policy: str
    num_scenarios: int
    num_plans: int
    num_moves: int

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.num_scenarios} scenarios, {self.num_plans:,} plans, {self.num_moves:,} moves; every request "
            f"was served with the tokens that it has without pauses, and no page was lost or owned twice"
        )


def check_policy(policy: PolicyChoice) -> PolicyReport:
    """Check that a policy keeps the rules of `Policy`: same tokens, no page lost, every request served.

    The scenarios are small and always the same: pools that hold all and pools too small, with and without host memory, slow
    links, all requests returning at once, calls that never return, aborts, follow-ups, shared prompts, several tenants; at both
    pipeline depths. Takes a second or two.

    Args:
        policy: as for `LLM`, but no object, since every scenario needs a new one.

    Returns:
        Counts, and a line of text when printed.

    Raises:
        PolicyCheckError: what the policy broke, and in which scenario. It is an `AssertionError`.
        ConfigError: there is no such policy, or it cannot be made.
    """
    check_no_object("policy", policy, Policy)
    check_choice(policy)
    name, num_plans, num_moves, num_scenarios = label(policy), 0, 0, 0

    def watch(made: Policy) -> WatchedPolicy:
        return WatchedPolicy(guard("policy", made, Policy, name), name)

    for title, scenario in scenarios():
        for depth in (0, 1):
            trial = replace(scenario, policy=policy, depth=depth)
            title_of_trial = f"{title}, pipeline depth {depth}"
            run, watched = play(f"policy {name}", title_of_trial, trial, watch, PolicyCheckError, "wrap")
            assert watched is not None
            num_plans += len(run.plans)
            num_moves += watched.num_moves
            num_scenarios += 1
    return PolicyReport(name, num_scenarios, num_plans, num_moves)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """The scenarios of `check_policy`, with what each is."""
    rng = Random(0)
    yield "a pool that holds all", Scenario(_drawn(rng, 6, 40), num_pages=80, num_host_pages=40)
    for number, (host, link) in enumerate(product((0, 3, 40), (1.0, 800.0, 1e6))):
        estimator = ("elapsed", "history", "oracle_wild")[number % 3]
        machine = f"a pool too small, {host} host pages, a link of {link:g} tokens/s"
        sizes = {"num_pages": rng.randint(8, 14), "num_host_pages": host, "link_tokens_per_s": link}
        yield machine, Scenario(_drawn(rng, 6, 4 * sizes["num_pages"]), estimator=estimator, **sizes)
    returning = Script("chat", 9, (Segment(3, 5.0, 6), Segment(2, 5.0, 6), Segment(4, None, 0)))
    for pages in (9, 20):
        yield (
            "all requests returning at once",
            Scenario(7 * (Arrival(0.0, returning),), num_pages=pages, num_host_pages=12),
        )
    hung = Script("chat", 12, (Segment(2, NEVER, 0), Segment(1, None, 0)))
    whole_pool = Script("math", 20, (Segment(3, 0.1, 5), Segment(20, None, 0)))
    never = (*(6 * (Arrival(0.0, hung),)), Arrival(1.0, whole_pool), Arrival(1.0, whole_pool))
    yield "calls that never return, then requests that need the whole pool", Scenario(never, num_host_pages=5)
    yield "calls that never return, whole prompts", Scenario(never, num_host_pages=0, whole_prompts=True)
    aborts = tuple((0.3 * number, number) for number in range(6))
    yield "requests aborted while they wait and while they are paused", Scenario(_drawn(rng, 6, 40), aborts=aborts)
    yield "prompts that share pages", Scenario(_drawn(rng, 6, 40), one_prompt=True)
    yield "follow-ups that extend retained contexts", Scenario(_drawn(rng, 6, 24), follow_ups=True)
    yield "three tenants", Scenario(_drawn(rng, 6, 40), num_tenants=3)


def _drawn(rng: Random, count: int, max_context: int) -> tuple[Arrival, ...]:
    """Requests of up to `max_context` tokens, with up to four calls."""
    return tuple(Arrival(rng.choice((0.0, 0.0, 0.03, 0.3, 2.0)), _script(rng, max_context)) for _ in range(count))


def _script(rng: Random, max_context: int) -> Script:
    room = rng.randint(max_context // 3, max_context)
    prompt = rng.randint(1, room // 2)
    room, segments = room - prompt, list[Segment]()
    for _ in range(rng.randint(0, 4)):
        decode, returned = rng.randint(1, 5), rng.randint(0, 8)
        if decode + returned >= room:
            break
        segments.append(Segment(decode, rng.choice((0.0, 0.005, 0.1, 2.0, 20.0)), returned))
        room -= decode + returned
    return Script(rng.choice(("math", "chat")), prompt, (*segments, Segment(min(room, 9), None, 0)))


class Watched(Protocol):
    """A policy or an order that is watched."""

    @property
    def problem(self) -> AssertionError | None:
        """The first rule that was broken."""
        ...


def play[W: Watched](
    plugin: str, title: str, scenario: Scenario, watch: Callable[[Any], W], kind: type[AssertionError], argument: str
) -> tuple[ScenarioRun, W | None]:
    """Run a scenario to its end; also returns the watched plugin, None if there was none. Raises a `kind`, with the title, for
    what the plugin broke.

    Args:
        watch: makes what `ScenarioRun` puts around the plugin.
        argument: of `ScenarioRun` that takes it.
    """
    watched: list[W] = []

    def wrap(made: Any) -> W:
        watched.append(watch(made))
        return watched[0]

    def check(run: ScenarioRun) -> None:
        if run.failures:
            raise run.failures[0]

    run, problem, cause = None, "", None
    wrapped: dict[str, Any] = {argument: wrap}
    try:
        run = ScenarioRun(scenario, watch=check, **wrapped).run(MAX_STEPS)
        problem = next(_problems(run, scenario), "")
    except (kind, PluginError) as error:
        problem, cause = str(error), error
    except Exception as error:  # that the plugin brought about
        problem, cause = f"breaks the engine: {describe_failure(error)}", error
    if watched and watched[0].problem is not None:  # what came after it follows from it
        problem, cause = str(watched[0].problem), watched[0].problem
    if run is None or problem:
        raise kind(f"the {plugin} {problem.removeprefix(f'the {plugin} ')} (scenario: {title})") from cause
    return run, watched[0] if watched else None


def _problems(run: ScenarioRun, scenario: Scenario) -> Iterator[str]:
    """The problems of the requests of a scenario that has ended."""
    aborted = {number for _, number in scenario.aborts}
    for number, (_, script) in enumerate(scenario.arrivals):
        output = run.outputs.get(number)
        if output is None and not hangs(script):
            yield f"loses request {number}: it never ends, though all its calls have returned"
        elif output is not None and number not in aborted:
            yield from _differences(number, script.generated, script.calls, output)
    for number in run.outputs.keys() - range(len(scenario.arrivals)):
        yield from _differences(number, FOLLOW_UP_TOKENS, 0, run.outputs[number])


def _differences(number: int, generated: int, calls: int, output: RequestOutput) -> Iterator[str]:
    """The problems of the tokens of a request that has ended."""
    [completion] = output.outputs
    stream = list(completion.token_ids)
    returned = {index for pause in completion.interceptions for index in range(*pause.span)}
    for index, token in enumerate(stream):
        if index not in returned and token != next_token([*output.prompt_token_ids, *stream[:index]]):
            yield f"changes the tokens of request {number}, from the {index + 1}. on: a page was read in the wrong place"
            return
    if (len(stream) - len(returned), len(completion.interceptions)) != (generated, calls):
        yield f"ends request {number} with {len(stream) - len(returned)} tokens of its {generated}"


def check_no_object(what: str, choice: object, protocol: type) -> None:
    """Raise `ConfigError` if a choice is an object with the members of a Protocol where a new one is needed for every run.

    Args:
        what: noun for the error, such as "policy".
    """
    if not isinstance(choice, str | type) and has_members(choice, protocol):
        raise ConfigError(
            f"a check needs a new {what} for each scenario", got=f"an object, {choice!r:.80}", fix="its class"
        )
