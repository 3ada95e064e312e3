"""Decides to which replica a request goes: the one at which its first token costs the fewest seconds.

The price of a replica is the seconds that its queue makes the request wait, and the seconds to recompute what the replica does
not hold, from the same `Profile` that prices steps inside an engine. A conversation therefore stays where its context is until
waiting there costs more than recomputing elsewhere. Prefixes that many conversations share, such as a system prompt, attract
new conversations only within a bound, so that the prefix is copied to one more replica and the load spreads (consistent hashing
with bounded loads, Mirrokni, Thorup and Zadimoghaddam, SODA 2018). Reads no clock: time arrives as `now`.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.sched.profile import Profile
from jinfercept.sched.tenants import Quota

SPREAD_BOUND = 1.25
"""New conversations of a replica, over their mean, beyond which a shared prefix attracts no more of them to it."""
SPREAD_SLACK = 2.0
"""New conversations of a replica below which the bound does not hold."""
KEYS_PER_CONVERSATION = 4
FIRST_PREFIXES = 2
"""Prefixes of every prompt that are recorded from its start: tools with instructions, and the first messages."""
SAME_PRICE_S = 1e-4
"""Prices that differ by less are the same, and the load decides."""
PLACED_HALF_LIFE_S = 300.0
"""Seconds after which a conversation that was placed counts half."""
MOST_CONTEXTS = 65_536
"""Contexts of one replica that are known."""

Reason = Literal["session", "conversation", "prefix", "moved", "spread", "load"]
"""Why a replica was chosen: it holds the named session, the conversation, or a shared prefix of a new one. Or not: waiting for
the replica with the conversation costs more (`moved`), a shared prefix is copied (`spread`), nothing is known (`load`)."""
_OWN: tuple[Reason | None, ...] = ("session", "conversation")

type TenantKey = tuple[str, bytes]
"""A tenant, and a key of one of its contexts."""


class NoReplicaError(RuntimeError):
    """No replica accepts requests."""


class Route(NamedTuple):
    """A decision: the tokens of the prompt that the replica should hold, and the predicted seconds until the first token."""

    replica: str
    reason: Reason
    found_tokens: int
    price_s: float


@dataclass(slots=True)
class ReplicaState:
    """The latest report of a replica.

    Attributes:
        queue_s: seconds until it would begin with a request that arrives now.
        accepts: whether it takes requests; not while it starts, drains or is dead.
    """

    name: str
    queue_s: float = 0.0
    accepts: bool = True
    at_s: float = -inf


@final
class _DecayedCount:
    """A count that halves every `PLACED_HALF_LIFE_S`."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._count, self._at = 0.0, 0.0

    def at(self, now: float) -> float:
        return self._count * 0.5 ** ((now - self._at) / PLACED_HALF_LIFE_S) if self._count else 0.0

    def add(self, now: float) -> None:
        self._count, self._at = self.at(now) + 1.0, now


@final
class _ReplicaLoad:
    """The work of a replica, what was sent there since its report and is worked off as time passes, and what it holds."""

    __slots__ = ("_num_tokens", "_queue_at", "_queue_s", "_reported_at", "in_flight", "name", "placed", "tokens_by_key")

    def __init__(self, name: str) -> None:
        self.name, self.in_flight, self.placed = name, 0, _DecayedCount()
        self._queue_s, self._queue_at, self._reported_at = 0.0, -inf, -inf
        self.tokens_by_key: dict[TenantKey, int] = {}  # tokens that count, the last used keys last
        self._num_tokens = 0

    def queue_s(self, state: ReplicaState, now: float) -> float:
        if state.at_s > self._reported_at:
            self._queue_s, self._queue_at, self._reported_at = state.queue_s, state.at_s, state.at_s
        return max(0.0, self._queue_s - (now - self._queue_at)) if self._queue_s else 0.0

    def send(self, queue_s: float, now: float) -> None:
        """Count a request, after which others wait `queue_s` seconds."""
        self.in_flight += 1
        self._queue_s, self._queue_at = queue_s, now

    def hold(self, keys: Sequence[TenantKey], num_tokens: int, pool_tokens: float) -> Iterator[TenantKey]:
        """Note a context that has been used; its tokens count once. Yields the keys of the contexts that are lost for it."""
        for place, key in enumerate(keys):
            self.lose(key)
            self.tokens_by_key[key] = 0 if place else num_tokens
            self._num_tokens += self.tokens_by_key[key]
        while self.tokens_by_key and (self._num_tokens > pool_tokens or len(self.tokens_by_key) > MOST_CONTEXTS):
            oldest = next(iter(self.tokens_by_key))
            self.lose(oldest)
            yield oldest

    def lose(self, key: TenantKey) -> None:
        self._num_tokens -= self.tokens_by_key.pop(key, 0)


@final
@dataclass(slots=True)
class _KnownPrefix:
    """A beginning of prompts.

    Attributes:
        holders: replicas that hold the context; some may be gone.
        shared: whether prompts that differ behind it have been seen.
        next_key: the key of the next message, in the first prompt that went on; None until one has.
    """

    tokens: int
    holders: tuple[_ReplicaLoad, ...] = ()
    shared: bool = False
    next_key: bytes | None = None

    def add(self, holder: _ReplicaLoad) -> None:
        if holder not in self.holders:
            self.holders = (*self.holders, holder)

    def drop(self, holder: _ReplicaLoad) -> None:
        self.holders = tuple([other for other in self.holders if other is not holder])

    def forks_at(self, next_key: bytes | None) -> bool:
        """Whether prompts differ behind this one, one of which goes on with this key (None: it ends here)."""
        return self.shared or (next_key is not None and self.next_key not in (None, next_key))

    def goes_on(self, next_key: bytes | None) -> None:
        self.shared = self.forks_at(next_key)
        self.next_key = self.next_key or next_key


class _HeldPrompt(NamedTuple):
    tokens: int = 0
    reason: Reason | None = None


_NOTHING_HELD = _HeldPrompt()


@final
class Router:
    """Routes requests by price, with bounded memory. Of too many keys the tenant with the most loses its oldest (`Quota`).

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
        self._quota = Quota[TenantKey](most_conversations * KEYS_PER_CONVERSATION)
        self._known: dict[TenantKey, _KnownPrefix] = {}
        self._loads: dict[str, _ReplicaLoad] = {}
        self._placed = _DecayedCount()

    @property
    def num_known(self) -> int:
        return len(self._known)

    def route(self, hint: RoutingHint, replicas: Sequence[ReplicaState], now: float) -> Route:
        """The replica for a request, which counts as work of that replica from now on.

        Of equal prices, one that holds the conversation wins, then one with less load, then one that holds more.
        `now` are seconds of the clock of the replicas' reports.

        Raises:
            NoReplicaError: none of the replicas accepts requests.
        """
        candidates = [state for state in replicas if state.accepts]
        if not candidates:
            raise NoReplicaError("no replica accepts requests")
        prefix_places, before_tokens = self._known_prefixes(hint)
        holdings = self._find(hint, prefix_places, {state.name for state in replicas})
        is_own = any(holding.reason in _OWN for holding in holdings.values())
        num_tokens = hint.prompt_tokens + before_tokens
        most_held, whole_s = max(0, num_tokens - 1), self._recompute_s(num_tokens)  # the last token is always computed
        bound = inf if is_own else max(SPREAD_SLACK, SPREAD_BOUND * self._placed.at(now) / len(replicas))

        def ranked(state: ReplicaState) -> tuple[tuple[int, bool, float, int], float, _ReplicaLoad]:
            load = self._load(state.name)
            holding, placed = holdings.get(load, _NOTHING_HELD), load.placed.at(now)
            found_tokens = min(holding.tokens, most_held) if placed < bound else 0
            saved_s = self._recompute_s(found_tokens) if found_tokens else 0.0
            price_s = load.queue_s(state, now) + whole_s - saved_s
            rank = round(price_s / SAME_PRICE_S), holding.reason not in _OWN, placed + load.in_flight, -holding.tokens
            return rank, price_s, load

        _, price_s, chosen = min(map(ranked, candidates), key=lambda choice: choice[0])
        holding = holdings.get(chosen, _NOTHING_HELD)
        chosen.send(price_s, now)
        if holding.reason not in _OWN:
            chosen.placed.add(now)
            self._placed.add(now)
        self._record(hint, chosen, num_tokens, prefix_places)
        moved = is_own and holding.reason not in _OWN
        reason = "moved" if moved else holding.reason or ("spread" if holdings else "load")
        return Route(chosen.name, reason, min(holding.tokens, most_held), price_s)

    def finished(
        self,
        hint: RoutingHint,
        replica: str,
        prompt_tokens: int,
        output_tokens: int = 0,
        *,
        response_key: bytes | None = None,
    ) -> None:
        """Note the end of a request: what its prompt really had, and the key that its follow-up may name."""
        load = self._loads.get(replica)
        if load is None:
            return
        load.in_flight = max(0, load.in_flight - 1)
        context_tokens = prompt_tokens + output_tokens
        for prefix in hint.prefixes:  # the turns before this one
            load.lose((hint.tenant, prefix.key))
        keys = [(hint.tenant, key) for key in hint.own_keys]
        for key in keys:
            if prefix := self._known.get(key):
                prefix.tokens = context_tokens
        for key in load.hold(keys, context_tokens, self._pool_tokens):
            if prefix := self._known.get(key):
                prefix.drop(load)
        for key in (response_key, hint.follows if hint.grows else None):
            if key is not None:
                prefix = self._touch((hint.tenant, key), context_tokens)
                prefix.tokens, prefix.holders = context_tokens, (load,)

    def failed(self, hint: RoutingHint, replica: str) -> None:
        """Note that a request ended without an answer: its replica may hold nothing of it."""
        load = self._loads.get(replica)
        if load is None:
            return
        load.in_flight = max(0, load.in_flight - 1)
        if hint.prefixes and (prefix := self._known.get((hint.tenant, hint.prefixes[0].key))):
            prefix.drop(load)

    def forget_replica(self, name: str) -> None:
        """Forget a replica and all that it held: it is dead, or has been replaced."""
        load = self._loads.pop(name, None)
        if load is not None:
            load.tokens_by_key.clear()

    def _recompute_s(self, num_tokens: int) -> float:
        return 0.0 if self._profile is None else self._profile.recompute_s(num_tokens, self._chunk_tokens)

    def _load(self, name: str) -> _ReplicaLoad:
        load = self._loads.get(name)
        if load is None:
            load = self._loads[name] = _ReplicaLoad(name)
        return load

    def _touch(self, key: TenantKey, tokens: int) -> _KnownPrefix:
        tenant = key[0]
        if (prefix := self._known.get(key)) is None:
            prefix = self._known[key] = _KnownPrefix(tokens)
        self._quota.add(tenant, key)
        while (oldest := self._quota.victim(tenant)) is not None:
            self._quota.remove(oldest[0], oldest)
            del self._known[oldest]
        return prefix

    def _known_prefixes(self, hint: RoutingHint) -> tuple[list[tuple[int, _KnownPrefix]], int]:
        prefixes = enumerate(hint.prefixes)
        prefix_places = [
            (place, entry) for place, (key, _) in prefixes if (entry := self._known.get((hint.tenant, key)))
        ]
        before = hint.follows and self._known.get((hint.tenant, hint.follows))
        return prefix_places, before.tokens if before else 0

    def _find(
        self, hint: RoutingHint, prefix_places: Sequence[tuple[int, _KnownPrefix]], names: Set[str]
    ) -> dict[_ReplicaLoad, _HeldPrompt]:
        tenant, prefixes, holdings = hint.tenant, hint.prefixes, dict[_ReplicaLoad, _HeldPrompt]()

        def holders(prefix: _KnownPrefix) -> Iterator[_ReplicaLoad]:
            return (load for load in prefix.holders if load.name in names and self._loads.get(load.name) is load)

        candidates: list[tuple[_KnownPrefix, Reason]] = []
        if hint.follows is not None and (prefix := self._known.get((tenant, hint.follows))):
            candidates.append((prefix, "conversation"))
        for place, prefix in prefix_places:
            forks = prefix.forks_at(prefixes[place - 1].key if place else None)
            candidates.append((prefix, "prefix" if forks else "conversation"))
        for prefix, reason in candidates:
            for load in holders(prefix):
                holdings.setdefault(load, _HeldPrompt(prefix.tokens, reason))
        if hint.named is not None and (prefix := self._known.get((tenant, hint.named))):
            reason = "prefix" if prefix.forks_at(hint.opening) else "session"
            for load in holders(prefix):
                holding = holdings.get(load, _NOTHING_HELD)
                if holding.reason in _OWN:
                    holdings[load] = holding._replace(reason="session")
                else:
                    holdings[load] = _HeldPrompt(max(holding.tokens, prefix.tokens), reason)
        return holdings

    def _record(
        self,
        hint: RoutingHint,
        holder: _ReplicaLoad,
        num_tokens: int,
        prefix_places: Sequence[tuple[int, _KnownPrefix]],
    ) -> None:
        """Note that a replica holds a prompt from now on: its whole, its first prefixes, and where it leaves a known one."""
        tenant, prefixes = hint.tenant, hint.prefixes
        places = {0, *range(max(0, len(prefixes) - FIRST_PREFIXES), len(prefixes))} if prefixes else set[int]()
        for place, prefix in prefix_places:
            is_same = place == 0 and prefix.next_key is None  # the same prompt again
            prefix.goes_on(prefixes[place - 1].key if place else None)
            prefix.shared |= is_same
            if prefix.shared:
                places.add(place)
        for place in places:
            key, tokens = prefixes[place]
            prefix = self._touch((tenant, key), tokens if place else num_tokens)
            prefix.next_key = prefix.next_key or (prefixes[place - 1].key if place else None)
            prefix.add(holder)
        if hint.named is not None:
            prefix = self._touch((tenant, hint.named), num_tokens)
            prefix.goes_on(hint.opening)
            prefix.holders = (holder,)
