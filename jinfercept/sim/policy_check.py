"""Runs a policy or an order through scenarios that break wrong ones: simulations that check their pages after every step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any, NamedTuple, cast, final

from jinfercept.engine.engine import Engine
from jinfercept.errors import ConfigError, PluginError, describe_failure
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.guards import guard
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
"""Steps of the engine after which requests of a scenario are taken to starve. The built-in policies need a tenth."""
PAGE_SIZE, MAX_SEQS, BUCKETS = 4, 3, (4, 12)
FOLLOW_UP_TOKENS = 4


class PolicyCheckError(AssertionError):
    """A policy breaks a rule of `Policy`, or an order one of `Order`."""


@final
class _OfferedPages:
    def __init__(self, policy: Policy, name: str) -> None:
        self._policy, self._name = policy, name
        self._paused: dict[str, Sequence] = {}
        self._shared: dict[str, set[int]] = {}  # indexes of pages that several contexts had, by sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def pause(self, sequence: Sequence, now: float) -> None:
        self._paused[sequence.id] = sequence
        self._policy.pause(sequence, now)

    def resume(self, sequence: Sequence, now: float) -> None:
        self._paused.pop(sequence.id, None)
        self._policy.resume(sequence, now)

    # An order of eviction may end only when it has offered every page whose slot can be taken. Pages that contexts have
    # shared while they were paused are the scheduler's.
    def victims(self, now: float) -> Iterator[Move]:
        self._note_shared()
        offered = {name: set(indexes) for name, indexes in self._shared.items()}
        for move in self._policy.victims(now):
            offered.setdefault(move.sequence.id, set()).update(move.pages)
            yield move
            self._note_shared()
        for sequence in self._paused.values():
            evictable = [run.pages for run in sequence.context.runs() if run.evictable]
            if pages := set[int]().union(*evictable) - offered.get(sequence.id, set()):
                doing = "waits for its calls" if sequence.state is State.INTERCEPTED else "waits to run"
                raise PolicyCheckError(
                    f"the {self._name} keeps page {min(pages)} of request {sequence.id}, which {doing}: `victims` ends "
                    "without it, while a running request needs a slot; it must offer every page of every paused request "
                    "in the end"
                )

    def _note_shared(self) -> None:
        for sequence in self._paused.values():
            shared = [run.pages for run in sequence.context.runs() if run.shared]
            self._shared.setdefault(sequence.id, set()).update(*shared)


class PolicyReport(NamedTuple):
    """The size of a check. Its text is a line."""

    policy: str
    num_scenarios: int
    num_plans: int

    def __str__(self) -> str:
        return (
            f"{self.policy}: {self.num_scenarios} scenarios, {self.num_plans:,} plans; every request was served to its end, "
            f"and no page was lost or owned twice"
        )


def check_policy(policy: PolicyChoice, order: OrderChoice = "fcfs") -> PolicyReport:
    """Check that a policy keeps the rules of `Policy`, and an order those of `Order`: no page is lost, every request is
    served.

    The scenarios are small and always the same: pools that hold all and pools too small, with and without host memory, slow
    links, all requests returning at once, calls that never return, aborts, follow-ups, shared prompts, several tenants; at
    both pipeline depths. Takes a second or two. Every scenario needs a new policy and order, so that neither may be an
    object.

    Raises:
        PolicyCheckError: an `AssertionError` with the broken rule and the scenario.
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
    return PolicyReport(label(policy), len(played), sum(played))


@dataclass(frozen=True)
class Scenario:
    """The requests and the machine of a check. A sequence may be as long as the pool."""

    arrivals: tuple[Arrival, ...]
    estimator: str = "elapsed"
    num_pages: int = 12
    num_host_pages: int = 8
    link_tokens_per_s: float = 800.0  # each way
    whole_prompts: bool = False
    one_prompt: bool = False  # all prompts begin alike, as far as the shorter one goes, so that contexts share pages
    aborts: tuple[tuple[float, int], ...] = ()  # the second of each abort, and the number of the request
    # each request that ends is followed at once by another one, which extends its retained context
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
    """The scenarios of `check_policy`, with their titles."""
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
    def __init__(self, scenario: Scenario, engine: Engine, clock: VirtualClock) -> None:
        self._scenario, self._engine, self._clock = scenario, engine, clock
        self._coming = sorted(enumerate(scenario.arrivals), key=lambda entry: entry[1].at_s)
        self._aborts, self._following = sorted(scenario.aborts), list[Request]()
        self._write = one_prompt_tokens if scenario.one_prompt else plain_tokens
        self._num_steps = 0
        self.outputs: dict[int, RequestOutput] = {}  # by the request's number, aborted ones too

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


def _play(title: str, scenario: Scenario, depth: int, policy: PolicyChoice, order: OrderChoice) -> int:

    def watched_policy(inputs: PolicyInputs) -> Policy:
        guarded = guard("policy", inputs.make(policy), Policy, label(policy))
        return cast(Policy, _OfferedPages(guarded, f"policy {label(policy)}"))

    def guarded_order(inputs: PolicyInputs) -> Order:
        made = make_order(order, inputs)
        assert made is not None, "an order, not first come"
        return guard("order", made, Order, label(order))

    machine = scenario.machine(depth, watched_policy, "fcfs" if order == "fcfs" else guarded_order)
    # the plug-in under test is the order, if one is given
    blamed = f"policy {label(policy)}" if order == "fcfs" else f"order {label(order)}"
    clock = VirtualClock()
    dispatcher = ScriptedDispatcher(clock, plain_tokens)
    problem, cause, accounts = "", None, None
    try:
        engine, accounts = machine.open_engine(clock, dispatcher)
        clients = _Clients(scenario, engine, clock)
        drive(engine, dispatcher, clock, clients, machine.most_s, lambda now, end: None)
        engine.check_pages()
        problem = next((f"the {blamed} {what}" for what in _problems(clients.outputs, scenario)), "")
    except (PolicyCheckError, PluginError) as error:
        # the engine reports what the check raises as a failure of the policy
        problem, cause = str(error.__cause__ if isinstance(error.__cause__, PolicyCheckError) else error), error
    except Exception as error:  # that the plugin brought about
        problem, cause = f"the {blamed} breaks the engine: {describe_failure(error)}", error
    if accounts is None or problem:
        raise PolicyCheckError(f"{problem} (scenario: {title})") from cause
    return accounts.iterations


def _problems(outputs: Mapping[int, RequestOutput], scenario: Scenario) -> Iterator[str]:
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
    # every run needs a new object
    if not isinstance(choice, str | type) and has_members(choice, protocol):
        raise ConfigError(
            f"a check needs a new {what} for each scenario", got=f"an object, {choice!r:.80}", fix="its class"
        )
