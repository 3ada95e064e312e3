"""Runs a policy or an order through scenarios that break wrong ones: simulations that check their pages after every step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from random import Random
from typing import Any, NamedTuple, cast, final

from jinfercept.engine.meter.request_log import LogEvent, Passed, RequestLog
from jinfercept.errors import ConfigError, PluginError, describe_failure
from jinfercept.sched.orders import Order, OrderChoice, check_order_choice, make_order
from jinfercept.sched.plugins import guard, has_members, label
from jinfercept.sched.policies import PolicyChoice, PolicyInputs, check_choice
from jinfercept.sched.policy import Move, Policy
from jinfercept.sched.profile import Profile
from jinfercept.sched.sequence import Sequence as RequestSequence
from jinfercept.sched.sequence import State
from jinfercept.sim.agent_sessions import ScriptedSession, ScriptedTurn
from jinfercept.sim.scripted import SessionLoad
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.workload import Arrival, Script, Segment

MAX_STEPS = 4000
"""Steps of the engine after which requests of a scenario are taken to starve. The built-in policies need a tenth."""
PAGE_SIZE, MAX_SEQS, BUCKETS = 4, 3, (4, 12)


class PolicyCheckError(AssertionError):
    """A policy breaks a rule of `Policy`, or an order one of `Order`."""


@final
class _OfferedPages:
    def __init__(self, policy: Policy, name: str) -> None:
        self._policy, self._name = policy, name
        self._paused: dict[str, RequestSequence] = {}
        self._shared: dict[str, set[int]] = {}  # indexes of pages that several contexts had, by sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def pause(self, sequence: RequestSequence, now: float) -> None:
        self._paused[sequence.id] = sequence
        self._policy.pause(sequence, now)

    def resume(self, sequence: RequestSequence, now: float) -> None:
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
        _play(f"{scenario.title}, pipeline depth {depth}", scenario, depth, policy, order)
        for scenario in scenarios()
        for depth in (0, 1)
    ]
    return PolicyReport(label(policy), len(played), sum(played))


class Scenario(NamedTuple):
    """A machine without its policy, and its requests."""

    title: str
    arrivals: Sequence[Arrival] | SessionLoad
    machine: Simulation


def _machine(num_pages: int = 12, num_host_pages: int = 8, link_tokens_per_s: float = 800.0, **more: Any) -> Simulation:
    # a sequence may be as long as the pool
    longest = num_pages * PAGE_SIZE
    profile = Profile(
        name="small",
        source="paper",
        fixed_s=0.010,
        per_query_s=1e-4,
        per_context_s=1e-6,
        saturation=BUCKETS[-1],
        link_out_tokens_per_s=link_tokens_per_s,
        link_in_tokens_per_s=link_tokens_per_s,
        link_both_tokens_per_s=link_tokens_per_s,
        kv_bytes_per_token=1,
    )
    options = {"duration_s": math.inf, "chunked_prefill": True, "buckets": BUCKETS} | more
    return Simulation(
        profile,
        "lru",
        kv_tokens=longest,
        host_tokens=num_host_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_SEQS,
        max_model_len=longest,
        prefix_caching=True,
        check=True,
        **options,
    )


def scenarios() -> Iterator[Scenario]:
    """The scenarios of `check_policy`."""
    rng = Random(0)
    yield Scenario("a pool that holds all", _drawn(rng, 40), _machine(80, 40))
    for number, (host, link) in enumerate(product((0, 3, 40), (1.0, 800.0, 1e6))):
        estimator, num_pages = ("elapsed", "history", "oracle")[number % 3], rng.randint(8, 14)
        title = f"a pool too small, {host} host pages, a link of {link:g} tokens/s"
        yield Scenario(title, _drawn(rng, 4 * num_pages), _machine(num_pages, host, link, estimator=estimator))
    returning = Script("chat", 9, (Segment(3, 5.0, 6), Segment(2, 5.0, 6), Segment(4, None, 0)))
    for pages in (9, 20):
        yield Scenario("all requests returning at once", 7 * (Arrival(0.0, returning),), _machine(pages, 12))
    hung = Script("chat", 12, (Segment(2, math.inf, 0), Segment(1, None, 0)))
    whole_pool = Script("math", 20, (Segment(3, 0.1, 5), Segment(20, None, 0)))
    never = (*(6 * (Arrival(0.0, hung),)), Arrival(1.0, whole_pool), Arrival(1.0, whole_pool))
    yield Scenario("calls that never return, then requests that need the whole pool", never, _machine(12, 5))
    whole = _machine(12, 0, chunked_prefill=False, buckets=(*BUCKETS, 12 * PAGE_SIZE))
    yield Scenario("calls that never return, whole prompts", never, whole)
    for duration_s in (0.2, 0.6, 1.5):
        machine = _machine(duration_s=duration_s, drain_s=0.0)
        yield Scenario("requests aborted while they wait and while they are paused", _drawn(rng, 40), machine)
    load = SessionLoad(_conversations(rng), seed=0, live=5, duration_s=1.0)
    yield Scenario("follow-ups of conversations that share pages", load, _machine())
    tenants = [arrival.script._replace(tenant=str(number % 3)) for number, arrival in enumerate(_drawn(rng, 40))]
    yield Scenario(
        "three tenants", [Arrival(0.1 * number, script) for number, script in enumerate(tenants)], _machine()
    )


def _drawn(rng: Random, max_context: int) -> list[Arrival]:
    times = sorted(rng.choice((0.0, 0.0, 0.03, 0.3, 2.0)) for _ in range(6))
    return [Arrival(at_s, _script(rng, max_context)) for at_s in times]


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


def _conversations(rng: Random) -> list[ScriptedSession]:
    sessions = list[ScriptedSession]()
    for number in range(5):
        first = ScriptedTurn(rng.randint(9, 16), rng.randint(2, 6), 0, 0.0, calls=number % 2 > 0)
        kept = first.prompt + first.decode
        second = ScriptedTurn(kept + rng.randint(1, 9), 4, kept, rng.choice((0.0, 0.1, 2.0)), calls=False)
        sessions.append(ScriptedSession(str(number), 8, (first, second)))
    return sessions


def _play(title: str, scenario: Scenario, depth: int, policy: PolicyChoice, order: OrderChoice) -> int:
    """Play a scenario and return the number of its plans."""

    def watched_policy(inputs: PolicyInputs) -> Policy:
        guarded = guard("policy", inputs.make(policy), Policy, label(policy))
        return cast(Policy, _OfferedPages(guarded, f"policy {label(policy)}"))

    def guarded_order(inputs: PolicyInputs) -> Order:
        made = make_order(order, inputs)
        assert made is not None, "an order, not first come"
        return guard("order", made, Order, label(order))

    steps = count()

    def count_steps(event: LogEvent) -> None:
        if isinstance(event, Passed) and next(steps) == MAX_STEPS:
            raise AssertionError(f"no end after {MAX_STEPS} steps")

    def watch(log: RequestLog, *rest: object) -> None:
        log.tell(count_steps)

    chosen_order = "fcfs" if order == "fcfs" else guarded_order
    machine = replace(scenario.machine, policy=watched_policy, order=chosen_order, depth=depth)
    # the plug-in under test is the order, if one is given
    blamed = f"policy {label(policy)}" if order == "fcfs" else f"order {label(order)}"
    try:
        report = machine.run(scenario.arrivals, watch=watch)
    except (PolicyCheckError, PluginError) as error:
        # the engine reports what the check raises as a failure of the policy
        problem = error.__cause__ if isinstance(error.__cause__, PolicyCheckError) else error
        raise PolicyCheckError(f"{problem} (scenario: {title})") from error
    except Exception as error:  # that the plugin brought about
        problem = f"the {blamed} breaks the engine: {describe_failure(error)}"
        raise PolicyCheckError(f"{problem} (scenario: {title})") from error
    if report["unfinished"] and machine.duration_s == math.inf:
        raise PolicyCheckError(f"the {blamed} leaves {report['unfinished']} requests unserved (scenario: {title})")
    return report["iterations"]


def _check_no_object(what: str, choice: object, protocol: type) -> None:
    # every run needs a new object
    if not isinstance(choice, str | type) and has_members(choice, protocol):
        raise ConfigError(
            f"a check needs a new {what} for each scenario", got=f"an object, {choice!r:.80}", fix="its class"
        )
