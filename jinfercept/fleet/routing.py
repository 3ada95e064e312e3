"""Decides to which replica a request goes: the one at which its first token costs the fewest seconds.

The price of a replica is the seconds that its queue makes the request wait, and the seconds to recompute what the replica does
not hold, from the same `Profile` that prices steps inside an engine. A conversation therefore stays where its context is until
waiting there costs more than recomputing elsewhere. Prefixes that many conversations share, such as a system prompt, attract
new conversations only within a bound: a replica that has got more of them than `SPREAD_BOUND` times the mean is passed over, so
that the prefix is copied to one more replica and the load spreads over those that hold it (consistent hashing with bounded
loads, Mirrokni, Thorup and Zadimoghaddam, SODA 2018). Reads no clock: time arrives as `now`.
"""

from collections.abc import Callable, Sequence, Set
from math import inf
from typing import Literal, NamedTuple, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.known_prefixes import Holder, KnownPrefix, KnownPrefixes
from jinfercept.fleet.replica_load import DecayedCount, ReplicaLoad, ReplicaState
from jinfercept.sched.profile import Profile

SPREAD_BOUND = 1.25
"""New conversations of a replica, over their mean, beyond which a shared prefix attracts no more of them to it."""
SPREAD_SLACK = 2.0
"""New conversations of a replica below which the bound does not hold."""
KEYS_PER_CONVERSATION = 4
FIRST_PREFIXES = 2
"""Prefixes of every prompt that are recorded from its start: tools with instructions, and the first messages."""
SAME_PRICE_S = 1e-4
"""Prices that differ by less are the same, and the load decides."""

Reason = Literal["session", "conversation", "prefix", "moved", "spread", "load"]
"""Why a replica was chosen: it holds the named session, the conversation, or a shared prefix of a new one. Or not: waiting for
the replica with the conversation costs more (`moved`), a shared prefix is copied (`spread`), nothing is known (`load`)."""


class NoReplicaError(RuntimeError):
    """No replica accepts requests."""


class Route(NamedTuple):
    """A decision.

    Attributes:
        replica: name of the chosen one.
        reason: why.
        found_tokens: of the prompt, which it should hold.
        price_s: predicted seconds until its first token.
    """

    replica: str
    reason: Reason
    found_tokens: int
    price_s: float


@final
class Router:
    """Routes requests by price; keeps what it must know for that in bounded memory.

    Args:
        profile: prices of recomputation; None: it costs nothing.
        chunk_tokens: most prompt tokens of a step.
        pool_tokens: of a replica's pools together, which lose the least recently used contexts.
        most_conversations: known at a time over all tenants, each with a few keys of about 470 bytes.
    """

    def __init__(
        self,
        profile: Profile | None,
        *,
        chunk_tokens: int = 512,
        pool_tokens: float = inf,
        most_conversations: int = 100_000,
    ) -> None:
        self._profile, self._chunk_tokens, self._pool_tokens = profile, chunk_tokens, pool_tokens
        self._known = KnownPrefixes(most_conversations * KEYS_PER_CONVERSATION)
        self._loads: dict[str, ReplicaLoad] = {}
        self._placed = DecayedCount()

    @property
    def num_known(self) -> int:
        """Keys in the table."""
        return len(self._known)

    def route(self, hint: RoutingHint, replicas: Sequence[ReplicaState], now: float) -> Route:
        """The replica for a request. Records the decision: the request counts as work of that replica from now on.

        Args:
            replicas: the members of the fleet.
            now: seconds of a monotonic clock, the same as in the replicas' reports.

        Raises:
            NoReplicaError: none of the replicas accepts requests.
        """
        holdings = self._find(hint, {state.name for state in replicas})
        prompt = _RoutedPrompt(hint.prompt_tokens + holdings.before_tokens, self._recompute_s)
        chosen, price_s = self._cheapest(holdings, prompt, replicas, now)
        holding = holdings.by_holder.get(chosen.holder, _NOTHING_HELD)
        found_tokens = min(holding.tokens, prompt.most_held)
        chosen.send(prompt.missing_s(found_tokens), now)
        if holding.reason not in _OWN:
            chosen.placed.add(now)
            self._placed.add(now)
        self._record(hint, chosen.holder, prompt.num_tokens, holdings)
        reason = (
            "moved" if holdings.is_own and holding.reason not in _OWN else holding.reason or holdings.reason_elsewhere
        )
        return Route(chosen.holder.name, reason, found_tokens, price_s)

    def finished(
        self,
        hint: RoutingHint,
        replica: str,
        prompt_tokens: int,
        output_tokens: int = 0,
        *,
        response_key: bytes | None = None,
    ) -> None:
        """Note the end of a request: what its prompt really had, and the key that its follow-up may name.

        Args:
            hint: of the request, as it was routed.
            prompt_tokens: real ones, with the context of a stored response.
            output_tokens: generated ones.
            response_key: of the stored response; see `conversations.response_key`.
        """
        load = self._loads.get(replica)
        if load is None:
            return
        load.in_flight = max(0, load.in_flight - 1)
        context_tokens = prompt_tokens + output_tokens
        for prefix in hint.prefixes:  # the turns before this one
            load.holder.lose((hint.tenant, prefix.key))
        keys = [(hint.tenant, key) for key in hint.own_keys]
        for key in keys:
            if prefix := self._known.get(*key):
                prefix.tokens = context_tokens
        for key in load.holder.hold(keys, context_tokens):
            if prefix := self._known.get(*key):
                prefix.drop(load.holder)
        for key in (response_key, hint.follows if hint.grows else None):
            if key is not None:
                prefix = self._known.touch(hint.tenant, key, context_tokens)
                prefix.tokens = context_tokens
                prefix.move_to(load.holder)

    def failed(self, hint: RoutingHint, replica: str) -> None:
        """Note that a request ended without an answer: its replica may hold nothing of it."""
        load = self._loads.get(replica)
        if load is None:
            return
        load.in_flight = max(0, load.in_flight - 1)
        if hint.prefixes and (prefix := self._known.get(hint.tenant, hint.prefixes[0].key)):
            prefix.drop(load.holder)

    def forget_replica(self, name: str) -> None:
        """Forget a replica and all that it held: it is dead, or has been replaced."""
        load = self._loads.pop(name, None)
        if load is not None:
            load.holder.forgotten = True

    # -- prices ----------------------------------------------------------------------------------------------------

    def _recompute_s(self, num_tokens: int) -> float:
        return 0.0 if self._profile is None else self._profile.recompute_s(num_tokens, self._chunk_tokens)

    def _cheapest(
        self,
        holdings: "_Holdings",
        prompt: "_RoutedPrompt",
        replicas: Sequence[ReplicaState],
        now: float,
    ) -> "tuple[ReplicaLoad, float]":
        """The replica with the least price; of several, one that holds the conversation, then the one with the least load, then
        the one that holds the most."""
        candidates = [state for state in replicas if state.accepts]
        if not candidates:
            raise NoReplicaError("no replica accepts requests")
        bound = inf if holdings.is_own else max(SPREAD_SLACK, SPREAD_BOUND * self._placed.at(now) / len(replicas))
        best: tuple[float, bool, float, int] | None = None
        choice = self._load(candidates[0].name), inf
        for state in candidates:
            load = self._load(state.name)
            placed = load.placed.at(now)
            held_tokens, why = holdings.by_holder.get(load.holder, _NOTHING_HELD)
            price_s = load.queue_s(state, now) + prompt.missing_s(held_tokens if placed < bound else 0)
            rank = (round(price_s / SAME_PRICE_S), why not in _OWN, placed + load.in_flight, -held_tokens)
            if best is None or rank < best:
                best, choice = rank, (load, price_s)
        return choice

    # -- what is known ---------------------------------------------------------------------------------------------

    def _load(self, name: str) -> "ReplicaLoad":
        load = self._loads.get(name)
        if load is None:
            load = self._loads[name] = ReplicaLoad(Holder(name, self._pool_tokens))
        return load

    def _find(self, hint: RoutingHint, names: Set[str]) -> "_Holdings":
        """The held part of a prompt, by replica: the longest prefix, the context that it follows, or the named session."""
        tenant, by_holder = hint.tenant, dict[Holder, _HeldPrompt]()

        def add(prefix: KnownPrefix, tokens: int, reason: Reason) -> None:
            for holder in prefix.holders:
                if holder.name in names:
                    by_holder.setdefault(holder, _HeldPrompt(tokens, reason))

        before_tokens = 0
        if hint.follows is not None and (prefix := self._known.get(tenant, hint.follows)):
            before_tokens = prefix.tokens
            add(prefix, prefix.tokens, "conversation")
        prefixes = hint.prefixes
        known_prefixes = [
            (place, entry) for place, prefix in enumerate(prefixes) if (entry := self._known.get(tenant, prefix.key))
        ]
        for place, prefix in known_prefixes:
            forks = prefix.forks_at(prefixes[place - 1].key if place else None)
            add(prefix, prefix.tokens, "prefix" if forks else "conversation")
        if hint.named is not None and (prefix := self._known.get(tenant, hint.named)):
            reason = "prefix" if prefix.forks_at(hint.opening) else "session"
            for holder in (holder for holder in prefix.holders if holder.name in names):
                holding = by_holder.get(holder, _NOTHING_HELD)
                if holding.reason in _OWN:
                    by_holder[holder] = holding._replace(reason="session")
                else:
                    by_holder[holder] = _HeldPrompt(max(holding.tokens, prefix.tokens), reason)
        return _Holdings(by_holder, before_tokens, known_prefixes)

    def _record(self, hint: RoutingHint, holder: Holder, prompt_tokens: int, holdings: "_Holdings") -> None:
        """Note that a replica holds a prompt from now on: its whole, its first prefixes, and where it leaves a known one."""
        tenant, prefixes = hint.tenant, hint.prefixes
        places = {0, *range(max(0, len(prefixes) - FIRST_PREFIXES), len(prefixes))} if prefixes else set[int]()
        for place, prefix in holdings.prefixes:
            next_key = prefixes[place - 1].key if place else None
            prefix.shared = prefix.forks_at(next_key) or (
                place == 0 and prefix.next_key is None
            )  # the same prompt again
            prefix.next_key = prefix.next_key or next_key
            if prefix.shared:
                places.add(place)
        for place in places:
            key, tokens = prefixes[place]
            prefix = self._known.touch(tenant, key, tokens if place else prompt_tokens)
            prefix.next_key = prefix.next_key or (prefixes[place - 1].key if place else None)
            prefix.add(holder)
        if hint.named is not None:
            prefix = self._known.touch(tenant, hint.named, prompt_tokens)
            prefix.shared = prefix.forks_at(hint.opening)
            prefix.next_key = prefix.next_key or hint.opening
            prefix.move_to(holder)


_OWN: tuple[Reason | None, ...] = ("session", "conversation")


class _HeldPrompt(NamedTuple):
    """Tokens of a prompt that a replica holds, and why it is known."""

    tokens: int
    reason: Reason | None


_NOTHING_HELD = _HeldPrompt(0, None)


class _Holdings(NamedTuple):
    """The replicas that hold parts of a prompt.

    Attributes:
        before_tokens: of the context that the prompt follows.
        prefixes: its known ones, with their places.
    """

    by_holder: dict[Holder, _HeldPrompt]
    before_tokens: int
    prefixes: Sequence[tuple[int, KnownPrefix]]

    @property
    def is_own(self) -> bool:
        return any(holding.reason in _OWN for holding in self.by_holder.values())

    @property
    def reason_elsewhere(self) -> Reason:
        """Why a replica is chosen that holds nothing of a new conversation."""
        return "spread" if self.by_holder else "load"


class _RoutedPrompt:
    """A prompt's tokens and the seconds to recompute them."""

    __slots__ = ("_all_s", "_recompute_s", "most_held", "num_tokens")

    def __init__(self, num_tokens: int, recompute_s: Callable[[int], float]) -> None:
        self.num_tokens, self._recompute_s, self._all_s = num_tokens, recompute_s, recompute_s(num_tokens)
        self.most_held = max(0, num_tokens - 1)  # the last token is always computed

    def missing_s(self, held_tokens: int) -> float:
        return self._all_s - self._recompute_s(min(held_tokens, self.most_held)) if held_tokens else self._all_s
