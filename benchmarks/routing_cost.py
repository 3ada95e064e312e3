"""What a routing decision costs: µs of `Router.route` with many known conversations, its memory, and the hashing before it.

Conversations of a few turns are routed until the table holds as many as asked for; then follow-ups of known conversations and
new ones, mixed, are timed alone. Their hints are made before; making hints is timed apart. Times are of the processor, so that
other programs on the machine do not count.

    python benchmarks/routing_cost.py [--conversations 100000] [--replicas 8] [--decisions 4000]
"""

import argparse
import gc
import random
import time
import tracemalloc
from statistics import median, quantiles
from typing import Any

from jinfercept.fleet.conversations import KeyedPrefix, RoutingHint, find_conversation
from jinfercept.fleet.replica_load import ReplicaState
from jinfercept.fleet.routing import Router
from jinfercept.sched.named_profiles import load_profile
from jinfercept.sim.tables import TextTable, show

SECRET = b"a secret of this benchmark"
COLUMNS = ("messages", "median µs", "p99 µs", "hashing µs", "keys", "MB", "bytes per key")
TENANTS = 100
SYSTEM_TOKENS, MESSAGE_TOKENS = 2000, 100


def chain(session: int, messages: int) -> tuple[KeyedPrefix, ...]:
    """Prefixes of a session's prompt: a system prompt that all share, and messages of its own."""
    keys = [b"system prompt".ljust(16), *((session << 32 | place).to_bytes(16, "big") for place in range(messages))]
    tokens = (SYSTEM_TOKENS + MESSAGE_TOKENS * place for place in range(messages + 1))
    return tuple(reversed([KeyedPrefix(*prefix) for prefix in zip(keys, tokens, strict=True)]))


def hint(session: int, prefixes: tuple[KeyedPrefix, ...], turn: int) -> RoutingHint:
    """The hint of a turn; every turn adds two messages."""
    seen = prefixes[-min(len(prefixes), 2 * turn + 2) :]
    return RoutingHint(str(session % TENANTS), None, None, prefixes[-2].key, seen, seen[0].tokens)


def body(messages: int) -> dict[str, Any]:
    """A chat body with a system prompt and messages as long as an agent's."""
    texts = [{"role": ("user", "assistant")[place % 2], "content": f"{place} " * 100} for place in range(messages)]
    return {"model": "m", "messages": [{"role": "system", "content": "x" * 4 * SYSTEM_TOKENS}, *texts]}


def filled(conversations: int, replicas: tuple[ReplicaState, ...]) -> Router:
    """A router that knows so many conversations of two turns."""
    router = Router(load_profile("paper-gptj-6b-a100"), most_conversations=conversations)
    for session in range(conversations):
        prefixes = chain(session, 4)
        for turn in range(2):
            hinted = hint(session, prefixes, turn)
            route = router.route(hinted, replicas, 0.01 * session)
            router.finished(hinted, route.replica, hinted.prompt_tokens, 50)
    return router


def timed(router: Router, hints: list[RoutingHint], replicas: tuple[ReplicaState, ...], now: float) -> list[float]:
    """µs of each decision."""
    took = list[float]()
    for hinted in hints:
        now += 0.01
        started = time.thread_time()
        route = router.route(hinted, replicas, now)
        took.append((time.thread_time() - started) * 1e6)
        router.finished(hinted, route.replica, hinted.prompt_tokens, 50)
    return took


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="what a routing decision costs")
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=4_000)
    options = parser.parse_args()
    replicas = tuple(ReplicaState(f"replica-{number}") for number in range(options.replicas))
    rng, rows = random.Random(0), list[tuple[str, ...]]()
    tracemalloc.start()
    router = filled(options.conversations, replicas)
    gc.collect()
    held_bytes, num_known = tracemalloc.get_traced_memory()[0], router.num_known
    tracemalloc.stop()
    for messages in (20, 200):
        young = range(options.conversations - options.decisions // 2, options.conversations)
        new = range(options.conversations * (1 + messages), options.conversations * (1 + messages) + len(young))
        hints = [hint(session, chain(session, messages), messages // 2) for session in (*young, *new)]
        rng.shuffle(hints)
        gc.collect()
        gc.freeze()
        took = timed(router, hints, replicas, 0.01 * options.conversations)
        gc.unfreeze()
        request, hashing = body(messages), list[float]()
        for _ in range(50):
            started = time.thread_time()
            find_conversation("POST", "/v1/chat/completions", {}, request, "", SECRET)
            hashing.append((time.thread_time() - started) * 1e6)
        p99 = quantiles(took, n=100)[-1]
        row = (median(took), p99, median(hashing), num_known, held_bytes / 1e6, held_bytes / num_known)
        rows.append((str(messages), *(f"{value:,.0f}" for value in row)))
    show(TextTable(f"{options.conversations:,} conversations, {options.replicas} replicas", COLUMNS, rows).shown())


if __name__ == "__main__":
    main()
