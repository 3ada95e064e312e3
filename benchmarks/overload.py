"""`python -m benchmarks overload`: a server past saturation, and a greedy key beside modest ones, with real clients over HTTP.

Requests arrive as Poisson processes, whether the server keeps up or not. What it serves in a second is measured first, by more
clients than it runs requests, for each server anew. One server has `--overload serve`, another one `refuse`.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from openai import AsyncOpenAI
from rich.console import Console

from benchmarks.servers import Reply, Target, child_server, complete, make_target
from jinfercept.errors import ConfigError
from jinfercept.sim.arrivals import arrival_times
from jinfercept.sim.reports import percentiles
from jinfercept.sim.tables import TextTable, check_least, number_text
from studies.answer import StudyAnswer
from studies.plots import Bars

LOADS = (0.5, 1.0, 2.0)
MODEST, MODEST_LOAD = ("a", "b", "c", "d"), 0.1
GREEDY, GREEDY_LOAD = "greedy", 2.0
"""Ten times its share of a fifth."""
LOADING = "load"
"""The key of what one key alone sends: what it has used before would count against a modest key."""
KEY_SEEDS = 3
"""Arrivals of the keys that are pooled: of one series a 99th percentile is what one burst happened to meet."""
ONE_KEY = "all with one key"
"""The play in which the modest names ask with the greedy key. It lasts until all are answered, so one series is played."""
VOCABULARY = 100
_WARM_UP = 0.25
"""Share of the seconds of a load whose requests do not count."""


class KeyReply(NamedTuple):
    """A reply, the key that asked, and the second of the run at which it did."""

    key: str
    at_s: float
    reply: Reply


class OverloadBench(NamedTuple):
    """The measurement.

    Attributes:
        model: as for `jinfercept serve`.
        flags: options of the engine.
        prompt_tokens, new_tokens: of every request.
        limit_s: seconds to a first token, of goodput.
        seconds: of every load.
        clients: that measure saturation.
        seed: of the arrivals; those of the keys are of this seed and the next ones.
        loads: of one key, over what is served at saturation.
    """

    model: str
    flags: Mapping[str, Any]
    prompt_tokens: int
    new_tokens: int
    limit_s: float
    seconds: float
    clients: int
    seed: int
    loads: tuple[float, ...] = LOADS

    def run(self, console: Console) -> StudyAnswer:
        """Measure. Raises `ConfigError` if the server does not start or answers nothing."""
        with tempfile.TemporaryDirectory() as folder:
            keys = Path(folder) / "keys.toml"
            keys.write_text(
                "\n".join(f'[{key}]\nkey = "{key}"' for key in (*MODEST, GREEDY, LOADING)), encoding="utf-8"
            )
            flags = {**self.flags, "api_key_file": keys, "max_queue_len": 100_000}
            with child_server(self.model, flags | {"overload": "serve"}) as taking:
                console.print("saturation")
                rate = asyncio.run(self._saturation(taking))
                by_load = dict(self._loads("takes all", taking, rate, console))
                by_key = dict(self._keys("fair", taking, rate, console))
            with child_server(self.model, flags | {"overload": "refuse"}) as refusing:
                console.print("saturation")
                rate = asyncio.run(self._saturation(refusing))
                by_load |= self._loads("refuses early", refusing, rate, console)
                by_key |= self._keys("fair, refuses early", refusing, rate, console)
        return self._answer(by_load, by_key)

    def _loads(
        self, way: str, url: str, rate: float, console: Console
    ) -> Iterator[tuple[tuple[str, float], list[KeyReply]]]:
        for load in self.loads:
            console.print(f"{way}: load {load:g}")
            played = self._play(url, [(LOADING, LOADING, load * rate)], f"load {load:g}", self.seed)
            yield (way, load), asyncio.run(played)

    def _keys(self, way: str, url: str, rate: float, console: Console) -> Iterator[tuple[str, list[KeyReply]]]:
        modest = [(key, key, MODEST_LOAD * rate) for key in MODEST]
        greedy = (GREEDY, GREEDY, GREEDY_LOAD * rate)
        plays = {f"{way}, no greedy key": modest, way: [*modest, greedy]}
        if way == "fair":
            plays[ONE_KEY] = [*((name, GREEDY, each) for name, _, each in modest), greedy]
        for name, keys in plays.items():
            replies = list[KeyReply]()
            for seed in range(self.seed, self.seed + (1 if name == ONE_KEY else KEY_SEEDS)):
                console.print(f"{name}: {len(keys)} keys, arrivals {seed}")
                replies += asyncio.run(self._play(url, keys, name, seed))
            yield name, replies

    async def _saturation(self, url: str, seconds: float | None = None) -> float:
        """Requests per second that the server completes while more clients ask than it can run."""
        ended: list[float] = []
        begun_s = time.perf_counter()
        until_s = begun_s + (seconds or self.seconds)

        async def loop(client: AsyncOpenAI, number: int) -> None:
            count = 0
            while time.perf_counter() < until_s:
                reply = await self._ask(client, f"saturation {number} {count}")
                count += 1
                if reply.error is None:
                    ended.append(reply.end_s)

        async with _target(url, LOADING).client() as client:
            await asyncio.gather(*(loop(client, number) for number in range(self.clients)))
        if not ended:
            raise ConfigError("the server answers nothing", got=url, fix="try a request of this size by hand")
        return len(ended) / (max(ended) - begun_s)

    async def _play(self, url: str, keys: Sequence[tuple[str, str, float]], play: str, seed: int) -> list[KeyReply]:
        """Play arrivals of a name, a key and a rate each, until those of all but the greedy name are answered.

        Args:
            play: makes the prompts others than those of other plays, whose contexts may be in the prefix cache.
            seed: of the arrivals.

        Returns:
            The replies that count.
        """
        began_s, replies = time.perf_counter(), list[KeyReply]()

        async def send(client: AsyncOpenAI, name: str, number: int, at_s: float) -> None:
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            reply = await self._ask(client, f"{play} {name} {number} {seed}")
            if at_s >= _WARM_UP * self.seconds:
                replies.append(KeyReply(name, at_s, reply))

        async with asyncio.TaskGroup() as group:
            clients = {key: _target(url, key).client() for _, key, _ in keys}
            tasks = {
                group.create_task(send(clients[key], name, number, at_s)): name
                for name, key, rate in keys
                for number, at_s in enumerate(arrival_times(rate, self.seconds, Random(f"{name} {seed}")))
            }
            await asyncio.wait([task for task, name in tasks.items() if name != GREEDY])
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for client in clients.values():
                await client.close()
        return replies

    async def _ask(self, client: AsyncOpenAI, seed: str) -> Reply:
        rng = Random(seed)
        prompt = [rng.randrange(VOCABULARY) for _ in range(self.prompt_tokens)]
        return await complete(client, self.model, prompt, self.new_tokens)

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _answer(
        self,
        by_load: Mapping[tuple[str, float], Sequence[KeyReply]],
        by_key: Mapping[str, Sequence[KeyReply]],
    ) -> StudyAnswer:
        of_s = (1.0 - _WARM_UP) * self.seconds
        goodput, p99, modest_p99 = dict[str, dict[str, float]](), dict[str, dict[str, float]](), dict[str, float]()
        loads, keys = list[list[str]](), list[list[str]]()
        for (way, load), replies in by_load.items():
            good = sum(self._is_good(sent.reply) for sent in replies) / of_s
            spread = _first_tokens(replies)
            goodput.setdefault(f"{load:g}", {})[way], p99.setdefault(f"{load:g}", {})[way] = good, spread["p99"]
            shown = [number_text(spread[part]) for part in ("p50", "p99")]
            loads.append([way, f"{load:g}", f"{len(replies) / of_s:.2f}", f"{good:.2f}", *shown, *_errors(replies)])
        for name, replies in by_key.items():
            modest = [sent for sent in replies if sent.key != GREEDY]
            spread = _first_tokens(modest)
            modest_p99[name] = spread["p99"]
            alone = modest_p99[
                next(other for other in modest_p99 if other == name or other == f"{name}, no greedy key")
            ]
            ratio = spread["p99"] / (alone or 1.0)
            shown = [number_text(spread[part]) for part in ("p50", "p90", "p99")]
            keys.append([name, f"{len(modest)}", *shown, f"{ratio:.2f}" if ratio != 1.0 else "", *_errors(modest)])
        size = f"{self.prompt_tokens} prompt tokens and {self.new_tokens} generated ones"
        title = f"{self.model}, {size}; load 1 is what was served at saturation. Goodput: first token in {self.limit_s:g} s."
        first = ["first token p50, s", "p99"]
        few = f"{len(MODEST)} keys of {MODEST_LOAD:.0%} each, beside one of {GREEDY_LOAD:.0%}: seconds to their first token."
        of_loads = TextTable(title, ["", "load", "requests/s", "goodput/s", *first, "refused", "other errors"], loads)
        of_keys = TextTable(
            few, ["", "requests", "p50", "p90", "p99", "p99 over alone", "refused", "other errors"], keys
        )
        by_name = {name: {"p99": of} for name, of in modest_p99.items()}
        bars = [
            Bars("goodput by load", "requests/s", goodput, beside=True),
            Bars("99th percentile of first tokens by load", "seconds", p99, beside=True),
            Bars("modest keys' 99th percentile", "seconds", by_name),
        ]
        return StudyAnswer(
            f"Overload on a real server: {self.model}",
            [of_loads, of_keys] if loads else [of_keys],
            list(self._findings(goodput)),
            [bars if loads else bars[2:]],
        )

    def _findings(self, goodput: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
        for way in next(iter(goodput.values()), ()):
            rates = {load: of[way] for load, of in goodput.items()}
            last = list(rates)[-1]
            share = rates[last] / (max(rates.values()) or 1.0)
            yield f"{way}: goodput at load {last} is {share:.2f} of its maximum."

    def _is_good(self, reply: Reply) -> bool:
        return reply.error is None and reply.first_s is not None and reply.first_s <= self.limit_s


def _target(url: str, key: str) -> Target:
    return make_target(f"{key}={url}", key, 600.0)


def _first_tokens(replies: Sequence[KeyReply]) -> dict[str, float]:
    """Mean and percentiles of the seconds to the first token, of those taken; zeros without any."""
    delays = percentiles((sent.reply.first_s for sent in replies if sent.reply.error is None), (50, 90, 99))
    return delays or dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)


def _errors(replies: Sequence[KeyReply]) -> tuple[str, str]:
    """Numbers of refused requests and of other failures."""
    refused = sum(sent.reply.error == "HTTP 429" for sent in replies)
    return f"{refused}", f"{sum(sent.reply.error is not None for sent in replies) - refused}"


def overload_command(bench: OverloadBench, out: str | None) -> int:
    """Measure, print and write; returns 0. Raises `ConfigError` if the options make no sense."""
    for flag, value, least in (
        ("--seconds", bench.seconds, 1.0),
        ("--limit", bench.limit_s, 0.001),
        ("--prompt-tokens", bench.prompt_tokens, 1),
        ("--new-tokens", bench.new_tokens, 1),
        ("--clients", bench.clients, 1),
    ):
        check_least(flag, value, least)
    answer = bench.run(Console(stderr=True))
    answer.show()
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        print(f"\nwritten: {', '.join(map(str, answer.write(Path(out), 'overload_measured')))}")
    return 0
