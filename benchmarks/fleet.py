"""Four replicas on this machine, and interleaved agent sessions without any key: how many prompt tokens are found by routing.

The same sessions are played through several fronts of one fleet, one after the other: `price` is the router that is served;
`random` draws a replica; `prefix_hash` takes the replica from a hash of the first kilobyte of the prompt, as engines without a
table do; `one` sends everything to one replica, whose answers the others must repeat.
"""

import asyncio
import hashlib
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, final

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from jinfercept.config import EngineOptions
from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.fan_out import fan_out_router
from jinfercept.fleet.front import FleetFront, create_front
from jinfercept.fleet.ray_deploy import ray_running
from jinfercept.fleet.replicas import ReplicaFacts, Replicas
from jinfercept.fleet.routing import ReplicaState, Route, Router
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import DrainingServer, listen
from jinfercept.sim.reports import write_json

LETTERS = list(range(64, 90))
"""Tokens of the tiny model's letters, so that a turn has the same tokens when it comes again as text."""
APPLICATION = "benchmark"
MODEL = "tiny"
LENGTH = 8192
WAYS = ("price", "prefix_hash", "random", "one")
_WORDS = ("tool", "result", "read", "write", "file", "line", "error", "value", "next", "table", "plan", "step", "call")
_ENGINE: EngineOptions = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_tokens": 32768,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "swap_space": 0.05,
    "profile": "quick",
}  # pyright: ignore[reportAssignmentType]


class FleetShape(NamedTuple):
    """What is played.

    Attributes:
        replicas: of the fleet.
        sessions: at a time, interleaved.
        turns: of a session.
        system_tokens: of the system prompt that all share.
        turn_tokens: of a user's turn.
        new_tokens: generated in a turn.
    """

    replicas: int = 4
    sessions: int = 64
    turns: int = 6
    system_tokens: int = 2000
    turn_tokens: int = 96
    new_tokens: int = 24


class Played(NamedTuple):
    """What came of one way of routing.

    Attributes:
        prompt, cached: tokens of all turns after the first, and those that the replica held.
        answered: of them, the tokens that the turn before had ended with.
        shared: of them, the tokens of the system prompt.
        replicas: requests by replica.
        reasons: requests by reason.
        texts: answers, by session and turn.
        seconds: all together.
        failed: requests without an answer.
    """

    prompt: int
    cached: int
    answered: int
    shared: int
    replicas: Counter[str]
    reasons: Counter[str]
    texts: dict[tuple[int, int], str]
    seconds: float
    failed: int

    @property
    def own_share(self) -> float:
        """Cached tokens of those answered before in one session; shared ones count as cached."""
        own = self.answered - self.shared
        return max(0.0, self.cached - self.shared) / own if own else 0.0


def fleet_command(shape: FleetShape, seed: int, json_path: str | None) -> int:
    """Run the command; returns 1 if an answer differs, or a request fails."""
    with tempfile.TemporaryDirectory() as folder, ray_running():
        from jinfercept.fleet.ray_application import Scale, run_replicas
        from jinfercept.fleet.ray_replica import ReplicaSpec

        write_long_model(Path(folder))
        options = ServerOptions(port=0, served_model_name=(MODEL,), drain_timeout=2.0)
        spec = ReplicaSpec(folder, _ENGINE, options, secrets.token_bytes(32))
        began_s = time.monotonic()
        run_replicas(APPLICATION, spec, Scale(shape.replicas, shape.replicas))
        print(f"{shape.replicas} replicas in {time.monotonic() - began_s:.1f} s", file=sys.stderr)
        results: dict[str, Played] = {}
        placer = SwitchedPlacer(seed)
        with fleet_front(APPLICATION, options, placer.begin) as url:
            for way in WAYS:
                placer.way = way
                results[way] = asyncio.run(_play(url, shape, seed, way))
                print(f"{way}: {results[way].seconds:.1f} s", file=sys.stderr)
    different = {
        way: sum(played.texts[key] != text for key, text in results["one"].texts.items())
        for way, played in results.items()
    }
    _show(results, different)
    if json_path is not None:
        write_json(
            json_path, {"shape": shape._asdict(), "ways": {way: _row(played) for way, played in results.items()}}
        )
    return int(any(different.values()) or any(played.failed for played in results.values()))


def write_long_model(folder: Path) -> None:
    """Write a tiny model with a long context."""
    import json

    from tests.soak.model import write_model

    write_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))


@contextmanager
def fleet_front(application: str, options: ServerOptions, begin: Callable[[ReplicaFacts], Any]) -> Iterator[str]:
    """A front of an application's replicas at a free port, in a thread. The fleet ends with it."""
    from ray import serve

    from jinfercept.fleet.ray_application import open_replicas

    async def connect() -> Replicas:
        return await open_replicas(application)

    async def end() -> None:
        await asyncio.to_thread(serve.shutdown)

    front = FleetFront(connect, options, MODEL, begin)
    listener, url = listen(options)
    server = DrainingServer(create_front(front, fan_out_router(front), end=end), front, listener)
    thread = threading.Thread(target=server.serve_until_signal)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield url
    finally:
        server.handle_exit(2, None)
        thread.join()


async def _play(url: str, shape: FleetShape, seed: int, way: str) -> Played:
    """Play all sessions at once; the cache of each way is its own."""
    texts: dict[tuple[int, int], str] = {}
    usage, replicas, reasons = Counter[str](), Counter[str](), Counter[str]()
    began_s = time.monotonic()

    async def session(client: AsyncOpenAI, number: int) -> None:
        rng = Random(f"{seed} {number}")
        messages: Any = [{"role": "system", "content": text_of(Random(seed), shape.system_tokens)}]
        previous_tokens = 0
        for turn in range(shape.turns):
            await asyncio.sleep(rng.expovariate(4.0))  # the agent's tool runs
            messages.append({"role": "user", "content": text_of(rng, shape.turn_tokens)})
            try:
                raw = await client.chat.completions.with_raw_response.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=shape.new_tokens,
                    temperature=0,
                    extra_body={"cache_salt": way, "ignore_eos": True, "allowed_token_ids": LETTERS},
                )
                answer = raw.parse()
            except Exception as error:
                usage["failed"] += 1
                print(f"{way}, session {number}: {error}", file=sys.stderr)
                return
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            text = answer.choices[0].message.content or ""
            texts[number, turn] = text
            replicas[raw.headers["x-jinfercept-replica"]] += 1
            reasons[raw.headers["x-jinfercept-route"]] += 1
            if turn:
                usage["known"] += previous_tokens
                usage["prompt"] += answer.usage.prompt_tokens
                usage["found"] += (details.cached_tokens if details else 0) or 0
                usage["shared"] += shape.system_tokens
            previous_tokens = answer.usage.total_tokens
            messages.append({"role": "assistant", "content": text})

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        await asyncio.gather(*(session(client, number) for number in range(shape.sessions)))
    seconds = time.monotonic() - began_s
    counts = (usage["prompt"], usage["found"], usage["known"], usage["shared"])
    return Played(*counts, replicas, reasons, texts, seconds, usage["failed"])


def text_of(rng: Random, length: int) -> str:
    """So many characters, each a token of the tiny model."""
    words = list[str]()
    while sum(map(len, words)) + len(words) <= length:
        words.append(rng.choice(_WORDS))
    return " ".join(words)[:length]


@final
class SwitchedPlacer:
    """The router that is served, and rivals without a table.

    Args:
        seed: of draws.

    Attributes:
        way: one of `WAYS`.
    """

    def __init__(self, seed: int) -> None:
        self.way = WAYS[0]
        self._rng = Random(seed)
        self._router: Router | None = None

    def begin(self, facts: ReplicaFacts) -> Any:
        """Make the router, as a front does."""
        self._router = Router(facts.profile, chunk_tokens=facts.chunk_tokens)
        return self

    @property
    def router(self) -> Router:
        """The router that is served."""
        assert self._router is not None
        return self._router

    def route(self, hint: RoutingHint, replicas: Sequence[ReplicaState], now: float) -> Route:
        """See `Router.route`."""
        if self.way == "price":
            return self.router.route(hint, replicas, now)
        names = sorted(state.name for state in replicas)
        if self.way == "random":
            place = self._rng.randrange(len(names))
        elif self.way == "one" or not hint.prefixes:
            place = 0
        else:
            first = hint.prefixes[-1].key  # ends behind the system prompt
            place = int.from_bytes(hashlib.sha256(first).digest()[:8]) % len(names)
        return Route(names[place], "load", 0, 0.0)

    def finished(self, *args: Any, **more: Any) -> None:
        """See `Router.finished`."""
        if self.way == "price":
            self.router.finished(*args, **more)

    def failed(self, hint: RoutingHint, replica: str) -> None:
        """See `Router.failed`."""
        if self.way == "price":
            self.router.failed(hint, replica)

    def forget_replica(self, name: str) -> None:
        """See `Router.forget_replica`."""
        self.router.forget_replica(name)


def _row(played: Played) -> dict[str, Any]:
    return {
        "prompt_tokens": played.prompt,
        "found_tokens": played.cached,
        "found_share": played.cached / max(1, played.prompt),
        "own_found_share": played.own_share,
        "busiest_share": max(played.replicas.values(), default=0) / max(1, played.replicas.total()),
        "reasons": dict(played.reasons),
        "seconds": played.seconds,
        "failed": played.failed,
    }


def _show(results: dict[str, Played], different: dict[str, int]) -> None:
    table = Table(title="prompt tokens after the first turn that the replica held")
    for name in (
        "routing",
        "found",
        "of a session's own, known before",
        "requests at the busiest",
        "seconds",
        "failed",
        "answers that differ",
    ):
        table.add_column(name, justify="left" if name == "routing" else "right")
    for way, played in results.items():
        row = _row(played)
        shares = (f"{row[name]:.1%}" for name in ("found_share", "own_found_share", "busiest_share"))
        table.add_row(way, *shares, f"{played.seconds:.1f}", str(played.failed), str(different[way]))
    Console().print(table)
