"""Runs a policy or an order through scenarios that they fail in: simulations whose engine checks its pages after every step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any, NamedTuple, final

from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError, PluginError, describe_failure
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.guards import Guard, guard
from jinfercept.sched.order import Order
from jinfercept.sched.orders import OrderChoice, check_order_choice, make_order
from jinfercept.sched.plugins import has_members, label
from jinfercept.sched.policies import PolicyChoice, PolicyInputs, check_choice
from jinfercept.sched.policy import Move, Policy
from jinfercept.sched.profile import Profile
from jinfercept.sched.sequence import Sequence, State
from jinfercept.sim.arrivals import Arrival
from jinfercept.sim.scripted import ScriptedDispatcher, drive, make_request, one_prompt_tokens, plain_tokens
from jinfercept.sim.simulation import Simulation, reads_durations
from jinfercept.sim.simulator import VirtualClock
from jinfercept.sim.workload import Script, Segment

MAX_STEPS = 4000
"""Steps of the engine after which requests of a scenario are taken to starve; the built-in policies need a tenth."""
PAGE_SIZE, MAX_SEQS, BUCKETS = 4, 3, (4, 12)
FOLLOW_UP_TOKENS = 4


class PolicyCheckError(AssertionError):
    """A policy breaks a rule of `Policy`, or an order one of `Order`."""


@final
class _RuleWatch:
    """Raises `PolicyCheckError` where a policy or an order breaks a rule.

    A sequence and its pages may not be written to, and an order of eviction ends only when every page was offered whose slot
    can be taken; pages that contexts share are the scheduler's.

    Args:
        plugin: noun and name, for errors.

    Attributes:
        problem: the first rule that was broken.
        num_moves: moves that were offered.
    """

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin
        self.problem: PolicyCheckError | None = None
        self.num_moves = 0
        self._sequences: dict[str, Sequence] = {}
        self._paused: dict[str, Sequence] = {}
        self._before: list[tuple[Sequence, dict[str, object]]] = []
        self._shared: dict[str, set[int]] = {}  # indexes of pages that several contexts had, by sequence
        self._offered: dict[str, set[int]] | None = (
            None  # of the last order of eviction; None: another call came after its begin
        )

    def call(self, method: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        for sequence in arguments:
            if isinstance(sequence, Sequence):
                self._sequences[sequence.id] = sequence
                if method == "pause":
                    self._paused[sequence.id] = sequence
                elif method == "resume":
                    self._paused.pop(sequence.id, None)
        self._note_shared()
        self._before = self._states()
        answer = call()
        self._compare(method)
        if method in ("pause", "wait", "resume", "moves"):
            self._offered = None
        elif isinstance(answer, Move):
            self.num_moves += 1
            if method == "victims" and self._offered is not None:
                self._offered.setdefault(answer.sequence.id, set()).update(answer.pages)
        elif method == "victims":
            if len(arguments) < 2:  # the order begins
                self._offered = {name: set(indexes) for name, indexes in self._shared.items()}
            elif answer is arguments[1] and self._offered is not None:  # it ends
                self._check_offered(self._offered)
        for sequence in [each for each in self._sequences.values() if each.state is State.FINISHED]:
            for table in (self._sequences, self._shared):
                table.pop(sequence.id, None)
        return answer

    def call_back(self, call: Callable[[], bool]) -> bool:
        self._compare("moves")
        self.num_moves += 1
        moved = call()
        self._before = self._states()
        return moved

    def _check_offered(self, offered: Mapping[str, set[int]]) -> None:
        for sequence in self._paused.values():
            evictable = [run.pages for run in sequence.context.runs() if run.evictable]
            pages = set[int]().union(*evictable) - offered.get(sequence.id, set())
            if pages:
                doing = "waits for its calls" if sequence.state is State.INTERCEPTED else "waits to run"
                self._fail(
                    f"keeps page {min(pages)} of request {sequence.id}, which {doing}: `victims` ends without it, while a "
                    f"running request needs a slot; it must offer every page of every paused request in the end"
                )

    def _note_shared(self) -> None:
        for sequence in self._paused.values():
            shared = self._shared.setdefault(sequence.id, set())
            for run in sequence.context.runs():
                if run.shared:
                    shared.update(run.pages)

    def _states(self) -> list[tuple[Sequence, dict[str, object]]]:
        return [(sequence, _state_of(sequence)) for sequence in self._sequences.values()]

    def _compare(self, method: str) -> None:
        for sequence, was in self._before:
            changed = [field for field, value in _state_of(sequence).items() if value != was[field]]
            if changed:
                self._fail(f"writes to request {sequence.id} in `{method}`: its {', '.join(changed)}; it may only read")

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or PolicyCheckError(f"the {self.plugin} {problem}")
        raise self.problem


def _state_of(sequence: Sequence) -> dict[str, object]:
    """The fields of a sequence that a policy or an order can see."""
    return {
        "state": sequence.state,
        "order": (sequence.order, sequence.priority, sequence.rank),
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
            f"was served to its end, and no page was lost or owned twice"
        )


def check_policy(policy: PolicyChoice, order: OrderChoice = "fcfs") -> PolicyReport:
    """Check that a policy keeps the rules of `Policy`, and an order of waiting requests those of `Order`: no page lost, every
    request served.

    The scenarios are small and always the same: pools that hold all and pools too small, with and without host memory, slow
    links, all requests returning at once, calls that never return, aborts, follow-ups, shared prompts, several tenants; at both
    pipeline depths. Takes a second or two.

    Args:
        policy, order: as for `LLM`, but no object, since every scenario needs a new one.

    Returns:
        Counts, and a line of text when printed.

    Raises:
        PolicyCheckError: what the policy or the order broke, and in which scenario. It is an `AssertionError`.
        ConfigError: there is no such policy or order, or it cannot be made.
    """
    _check_no_object("policy", policy, Policy)
    _check_no_object("order", order, Order)
    check_choice(policy)
    check_order_choice(order)
    played = [
        _play(f"{title}, pipeline depth {depth}", scenario, depth, policy, order)
        for title, scenario in scenarios()
        for depth in (0, 1)
    ]
    return PolicyReport(label(policy), len(played), *map(sum, zip(*played, strict=True)))


@dataclass(frozen=True)
class Scenario:
    """The requests and the machine of a check. A sequence may be as long as the pool.

    Attributes:
        num_pages, num_host_pages: slots of the two pools.
        link_tokens_per_s: of the host link, each way.
        whole_prompts: no chunked prefill.
        one_prompt: all prompts are alike as far as the shorter one goes, so that contexts share pages.
        aborts: seconds and numbers of requests that are aborted then.
        follow_ups: each request that ends is followed, at once, by another one that extends its retained context.
    """

    arrivals: tuple[Arrival, ...]
    estimator: str = "elapsed"
    num_pages: int = 12
    num_host_pages: int = 8
    link_tokens_per_s: float = 800.0
    whole_prompts: bool = False
    one_prompt: bool = False
    aborts: tuple[tuple[float, int], ...] = ()
    follow_ups: bool = False

    def machine(self, depth: int, policy: PolicyChoice, order: OrderChoice) -> Simulation:
        longest, link = self.num_pages * PAGE_SIZE, self.link_tokens_per_s
        profile = Profile(
            name="small",
            source="paper",
            fixed_s=0.010,
            per_query_s=1e-4,
            per_context_s=1e-6,
            saturation=BUCKETS[-1],
            link_out_tokens_per_s=link,
            link_in_tokens_per_s=link,
            link_both_tokens_per_s=link,
            kv_bytes_per_token=1,
        )
        return Simulation(
            profile,
            policy,
            self.estimator,
            duration_s=math.inf,
            kv_tokens=longest,
            host_tokens=self.num_host_pages * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_num_seqs=MAX_SEQS,
            max_model_len=longest,
            chunked_prefill=not self.whole_prompts,
            buckets=(*BUCKETS, max(longest, BUCKETS[-1] + 1)) if self.whole_prompts else BUCKETS,
            prefix_caching=True,
            order=order,
            depth=depth,
        )


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """The scenarios of `check_policy`, with what each is."""
    rng = Random(0)
    yield "a pool that holds all", Scenario(_drawn(rng, 6, 40), num_pages=80, num_host_pages=40)
    for number, (host, link) in enumerate(product((0, 3, 40), (1.0, 800.0, 1e6))):
        estimator = ("elapsed", "history", "oracle")[number % 3]
        machine = f"a pool too small, {host} host pages, a link of {link:g} tokens/s"
        sizes = {"num_pages": rng.randint(8, 14), "num_host_pages": host, "link_tokens_per_s": link}
        yield machine, Scenario(_drawn(rng, 6, 4 * sizes["num_pages"]), estimator=estimator, **sizes)
    returning = Script("chat", 9, (Segment(3, 5.0, 6), Segment(2, 5.0, 6), Segment(4, None, 0)))
    for pages in (9, 20):
        yield (
            "all requests returning at once",
            Scenario(7 * (Arrival(0.0, returning),), num_pages=pages, num_host_pages=12),
        )
    hung = Script("chat", 12, (Segment(2, math.inf, 0), Segment(1, None, 0)))
    whole_pool = Script("math", 20, (Segment(3, 0.1, 5), Segment(20, None, 0)))
    never = (*(6 * (Arrival(0.0, hung),)), Arrival(1.0, whole_pool), Arrival(1.0, whole_pool))
    yield "calls that never return, then requests that need the whole pool", Scenario(never, num_host_pages=5)
    yield "calls that never return, whole prompts", Scenario(never, num_host_pages=0, whole_prompts=True)
    aborts = tuple((0.3 * number, number) for number in range(6))
    yield "requests aborted while they wait and while they are paused", Scenario(_drawn(rng, 6, 40), aborts=aborts)
    yield "prompts that share pages", Scenario(_drawn(rng, 6, 40), one_prompt=True)
    yield "follow-ups that extend retained contexts", Scenario(_drawn(rng, 6, 24), follow_ups=True)
    tenants = enumerate(_drawn(rng, 6, 40))
    of_tenants = (Arrival(at_s, script._replace(tenant=str(number % 3))) for number, (at_s, script) in tenants)
    yield "three tenants", Scenario(tuple(of_tenants))


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


@final
class _Clients:
    """`sim.scripted.Clients` of a scenario, who abort and follow up, and check the engine's pages after every step.

    Attributes:
        outputs: by the request's number; of those that were aborted too.
    """

    def __init__(self, scenario: Scenario, engine: Engine, clock: VirtualClock) -> None:
        self._scenario, self._engine, self._clock = scenario, engine, clock
        self._coming = sorted(enumerate(scenario.arrivals), key=lambda entry: entry[1].at_s)
        self._aborts, self._following = sorted(scenario.aborts), list[Request]()
        self._write = one_prompt_tokens if scenario.one_prompt else plain_tokens
        self._num_steps = 0
        self.outputs: dict[int, RequestOutput] = {}

    @property
    def next_s(self) -> float:
        if self._following:
            return self._clock.time
        return min(
            [arrival.at_s for _, arrival in self._coming[:1]] + [at_s for at_s, _ in self._aborts[:1]] + [math.inf]
        )

    def due(self, now: float) -> Iterator[Request]:
        self._engine.check_pages()
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise AssertionError(f"no end after {MAX_STEPS} steps: {self._engine.scheduler.unfinished}")
        while self._coming and self._coming[0][1].at_s <= now:
            number, (_, script) = self._coming.pop(0)
            request = make_request(number, script, self._write, reads_durations(self._scenario.estimator))
            yield replace(request, tenant=script.tenant, follow_up=FollowUp() if self._scenario.follow_ups else None)
        while self._aborts and self._aborts[0][0] <= now:
            self._engine.abort(str(self._aborts.pop(0)[1]))
        yield from self._following
        self._following = []

    def ended(self, output: RequestOutput) -> None:
        number, count = int(output.request_id), len(self._scenario.arrivals)
        self.outputs[number] = output
        prompt = (*output.prompt_token_ids, *output.outputs[0].token_ids, *plain_tokens(number, 1, 3))
        longest = self._scenario.num_pages * PAGE_SIZE
        if self._scenario.follow_ups and number < count and len(prompt) + FOLLOW_UP_TOKENS < longest:
            params = SamplingParams(temperature=0.0, max_tokens=FOLLOW_UP_TOKENS, ignore_eos=True)
            self._following.append(Request(str(number + count), prompt, params, follows=str(number)))


def _play(title: str, scenario: Scenario, depth: int, policy: PolicyChoice, order: OrderChoice) -> tuple[int, int]:
    """Run a scenario to its end: plans and moves. Raises `PolicyCheckError`, with the title, for what was broken."""
    watches: list[_RuleWatch] = []

    def watched(what: str, made: Any, choice: object, protocol: type) -> Any:
        guarded: Guard = guard(what, made, protocol, label(choice))
        guarded.watch = _RuleWatch(f"{what} {label(choice)}")
        watches.append(guarded.watch)
        return guarded

    def watched_policy(inputs: PolicyInputs) -> Policy:
        return watched("policy", inputs.make(policy), policy, Policy)

    def watched_order(inputs: PolicyInputs) -> Order:
        return watched("order", make_order(order, inputs), order, Order)

    outputs, num_plans, problem, cause = None, 0, "", None
    try:
        machine = scenario.machine(depth, watched_policy, "fcfs" if order == "fcfs" else watched_order)
        clock = VirtualClock()
        dispatcher = ScriptedDispatcher(clock, plain_tokens)
        engine, accounts = machine.open_engine(clock, dispatcher)
        clients = _Clients(scenario, engine, clock)
        drive(engine, dispatcher, clock, clients, machine.most_s, lambda now, end: None)
        engine.check_pages()
        outputs, num_plans = clients.outputs, accounts.iterations
        problem = next(_problems(outputs, scenario), "")
    except (PolicyCheckError, PluginError) as error:
        problem, cause = str(error), error
    except Exception as error:  # that the plugin brought about
        problem, cause = f"breaks the engine: {describe_failure(error)}", error
    for watch in watches:
        if watch.problem is not None:  # what came after it follows from it
            problem, cause = str(watch.problem), watch.problem
    if outputs is None or problem:
        # the plug-in under test is the order, if one is given
        blamed = f"policy {label(policy)}" if order == "fcfs" else f"order {label(order)}"
        raise PolicyCheckError(
            f"{'' if problem.startswith('the ') else f'the {blamed} '}{problem} (scenario: {title})"
        ) from cause
    return num_plans, sum(watch.num_moves for watch in watches)


def _problems(outputs: Mapping[int, RequestOutput], scenario: Scenario) -> Iterator[str]:
    """The problems of the requests of a scenario that has ended."""
    aborted = {number for _, number in scenario.aborts}
    for number, output in outputs.items():
        script = scenario.arrivals[number].script if number < len(scenario.arrivals) else None
        if number in aborted or (script and any(segment.call_s == math.inf for segment in script.segments)):
            continue
        [completion] = output.outputs
        generated, calls = (script.generated, script.calls) if script else (FOLLOW_UP_TOKENS, 0)
        if (completion.num_generated, len(completion.interceptions)) != (generated, calls):
            yield f"ends request {number} with {completion.num_generated} tokens of its {generated}"


def _check_no_object(what: str, choice: object, protocol: type) -> None:
    """Raise `ConfigError` if a choice is an object with the members of a Protocol where a new one is needed for every run.

    Args:
        what: noun for the error, such as "policy".
    """
    if not isinstance(choice, str | type) and has_members(choice, protocol):
        raise ConfigError(
            f"a check needs a new {what} for each scenario", got=f"an object, {choice!r:.80}", fix="its class"
        )
