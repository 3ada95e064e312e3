"""What `jinfercept plan` predicts of four replicas, beside four real ones: requests and tokens per second, and times of a turn.

The replicas are those of `jinfercept serve --replicas 4`: actors of Ray, the front, the router, engines, a tiny model.
The model sleeps in each step for a stated time and for one that grows with the bucket's tokens, so that four of them do not
compete for the cores of this machine. The plan's simulator gets the profile that the first replica measures at its start.
"""

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from openai import AsyncOpenAI

from benchmarks.fleet import LETTERS, MODEL, fleet_front, text_of, write_long_model
from jinfercept.fleet.ray_start import ray_running
from jinfercept.fleet.replicas import ReplicaFacts
from jinfercept.fleet.routes import RequestPlacer
from jinfercept.fleet.routing import Router
from jinfercept.meter.turns import LIMITS
from jinfercept.models.blocks import Attend
from jinfercept.models.dummy import random_params
from jinfercept.models.load import read_config
from jinfercept.models.model import Model
from jinfercept.models.protocol import ModelDimensions, Weights
from jinfercept.planner.cluster import by_price, play_cluster
from jinfercept.planner.sessions import AgentSession, Turn, draw_sessions
from jinfercept.planner.simulated_replicas import FinishedTurn, SteppedReplica
from jinfercept.planner.sizing import DRAIN, WARM_UP, ReplicaKind, profile_kind
from jinfercept.server.options import ServerOptions
from jinfercept.sim.plots import Bars
from jinfercept.sim.tables import TextTable, check_least
from jinfercept.sim.workload import Script, Segment
from jinfercept.tokenizer.load import load_tokenizer
from studies.answer import StudyAnswer

APPLICATION = "plan-truth"
STEP_S, TOKEN_S = 0.03, 0.0001
"""Seconds that a step sleeps, and that it sleeps for each query token of its bucket."""
SYSTEM_TOKENS, TURNS = 512, 4
_SYSTEM, _USER, _ASSISTANT = (len(role) + 4 for role in ("system", "user", "assistant"))
"""Tokens of the template around a message."""
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "kv_tokens": 16384,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "swap_space": 0.05,
    "profile": "measure",
}


class Served(NamedTuple):
    """A turn that was served.

    Attributes:
        end_s: second at which its answer had come.
        turn_s: seconds from its sending.
        tokens: generated.
        cached, prompt: tokens of the prompt that were held, and all.
    """

    end_s: float
    turn_s: float
    tokens: int
    cached: int
    prompt: int


class Throughput(NamedTuple):
    """Means over the counted seconds."""

    turns_per_s: float
    tokens_per_s: float
    turn_s: float
    found_share: float


@final
class PacedModel:
    """A model whose steps take a stated time: it sleeps where it looks up its tokens."""

    def __init__(self, model: Model, folder: str) -> None:
        self._model, self._folder = model, folder

    def __reduce__(self) -> tuple[Callable[[str], "PacedModel"], tuple[str]]:
        return paced_model, (self._folder,)

    @property
    def config(self) -> ModelDimensions:
        """See `ServedModel`."""
        return self._model.config

    def embed(self, params: Weights, tokens: Int[Array, "T"], positions: Int[Array, "T"]) -> Float[Array, "T E"]:
        """See `ServedModel`."""
        seconds = STEP_S + TOKEN_S * len(tokens)

        def sleep(tokens: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return np.zeros((), np.float32)

        paused = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), tokens)
        return self._model.embed(params, tokens, positions) + paused

    def layer[KV](
        self, params: Weights, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        """See `ServedModel`."""
        return self._model.layer(params, x, positions, kv, attend)

    def head(self, params: Weights, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """See `ServedModel`."""
        return self._model.head(params, x)


def paced_model(folder: str) -> PacedModel:
    """The model of a folder, slowed down."""
    return PacedModel(Model(read_config(folder)), folder)


@final
class PacedOptions(Mapping[str, Any]):
    """Options of a replica's `LLM` that goes to its process as the name of a folder: weights and tokenizer are made there."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Any:
        match name:
            case "params":
                return random_params(read_config(self._folder), "float32", 0)
            case "tokenizer":
                return load_tokenizer(Path(self._folder))
            case _:
                return _ENGINE[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*_ENGINE, "params", "tokenizer"))

    def __len__(self) -> int:
        return len(_ENGINE) + 2


def _scripts(rng: Random) -> Callable[[], Script]:
    """Agents of four turns: short answers, calls of a second in the mean."""

    def script() -> Script:
        calls = [rng.expovariate(1.0) for _ in range(TURNS - 1)]
        returned = [rng.randint(50, 200) + _USER + _ASSISTANT - 1 for _ in calls]
        segments = [Segment(rng.randint(20, 60), *call) for call in zip(calls, returned, strict=True)]
        return Script("agent", rng.randint(150, 500), (*segments, Segment(rng.randint(20, 60), None, 0)))

    return script


@final
class _Recorded:
    """A stepped replica that notes its turns."""

    def __init__(self, replica: SteppedReplica, served: list[Served]) -> None:
        self._replica, self._served = replica, served

    @property
    def next_s(self) -> float:
        return self._replica.next_s

    @property
    def busy_s(self) -> float:
        return self._replica.busy_s

    def submit(self, turn: Turn, now: float) -> None:
        self._replica.submit(turn, now)

    def advance(self) -> list[FinishedTurn]:
        finished = self._replica.advance()
        self._served += [
            Served(
                visit.finished_s,
                visit.finished_s - visit.turn.at_s,
                visit.turn.new_tokens,
                visit.cached_tokens,
                visit.turn.prompt_tokens,
            )
            for visit in finished
        ]
        return finished

    def queue_s(self, now: float) -> float:
        return self._replica.queue_s(now)


class PlanTruth(NamedTuple):
    """The comparison.

    Attributes:
        replicas: of the fleet.
        rates: sessions per second.
        seconds: in which sessions begin.
        seed: of the sessions.
    """

    replicas: int
    rates: Sequence[float]
    seconds: float
    seed: int

    def run(self) -> StudyAnswer:
        """Serve and simulate."""
        with tempfile.TemporaryDirectory() as folder, ray_running(None):
            from ray import cloudpickle

            from jinfercept.fleet.ray_application import Scale, run_replicas
            from jinfercept.fleet.ray_replica import ReplicaSpec

            cloudpickle.register_pickle_by_value(sys.modules[__name__])
            write_long_model(Path(folder))
            options = ServerOptions(port=0, served_model_name=(MODEL,), drain_timeout=2.0)
            model: Any = paced_model(folder)
            paced: Any = PacedOptions(folder)
            spec = ReplicaSpec(model, paced, options, secrets.token_bytes(32))
            run_replicas(APPLICATION, spec, Scale(self.replicas, self.replicas))
            placer = _RememberedFacts()
            with fleet_front(APPLICATION, options, placer.begin) as url:
                real = {rate: self._throughput(asyncio.run(self._serve(url, rate))) for rate in self.rates}
            kind = placer.kind(Path(folder))
        planned = {rate: self._throughput(self._simulate(kind, rate)) for rate in self.rates}
        return self._answer(real, planned)

    def _sessions(self, rate: float) -> Iterable[AgentSession]:
        return draw_sessions(_scripts, rate, self.seconds, self.seed, SYSTEM_TOKENS + _SYSTEM + _USER + _ASSISTANT)

    def _simulate(self, kind: ReplicaKind, rate: float) -> list[Served]:
        served = list[Served]()
        replicas = [_Recorded(SteppedReplica(kind.simulation), served) for _ in range(self.replicas)]
        policy = by_price(kind.simulation.profile, self.seed)
        play_cluster(replicas, policy, self._sessions(rate), LIMITS, (1 + DRAIN) * self.seconds)
        return served

    async def _serve(self, url: str, rate: float) -> list[Served]:
        served, began_s = list[Served](), time.monotonic()
        most_s = (1 + DRAIN) * self.seconds

        async def play(client: AsyncOpenAI, session: AgentSession) -> None:
            await asyncio.sleep(began_s + session.at_s - time.monotonic())
            rng = Random(f"{self.seed} {rate} {session.number}")
            messages: Any = [{"role": "system", "content": text_of(Random(self.seed), SYSTEM_TOKENS)}]
            tokens = session.script.prompt
            for segment in session.script.segments:
                messages.append({"role": "user", "content": text_of(rng, tokens)})
                sent_s = time.monotonic()
                answer = await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=segment.decode,
                    temperature=0,
                    extra_body={"cache_salt": str(rate), "ignore_eos": True, "allowed_token_ids": LETTERS},
                )
                now = time.monotonic()
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                cached = (details.cached_tokens if details else 0) or 0
                served.append(Served(now - began_s, now - sent_s, segment.decode, cached, answer.usage.prompt_tokens))
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                if segment.call_s is None:
                    break
                await asyncio.sleep(segment.call_s)
                tokens = segment.returned - (_USER + _ASSISTANT - 1)

        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            tasks = [asyncio.create_task(play(client, session)) for session in self._sessions(rate)]
            _, late = await asyncio.wait(tasks, timeout=most_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        print(f"{rate:g} sessions/s: {len(served)} turns served, {len(late)} sessions unfinished", file=sys.stderr)
        for task in tasks:
            if task not in late:
                task.result()
        return served

    def _throughput(self, served: Sequence[Served]) -> Throughput:
        begin_s, end_s = WARM_UP * self.seconds, self.seconds
        counted = [turn for turn in served if begin_s <= turn.end_s < end_s]
        seconds = end_s - begin_s
        return Throughput(
            len(counted) / seconds,
            sum(turn.tokens for turn in counted) / seconds,
            fmean(turn.turn_s for turn in counted),
            sum(turn.cached for turn in counted) / sum(turn.prompt for turn in counted),
        )

    def _answer(self, real: Mapping[float, Throughput], planned: Mapping[float, Throughput]) -> StudyAnswer:
        rows = [
            [
                f"{rate:g}",
                *(f"{number:.2f}" for number in (planned[rate].turns_per_s, measured.turns_per_s)),
                *(f"{number:.0f}" for number in (planned[rate].tokens_per_s, measured.tokens_per_s)),
                f"{measured.tokens_per_s / planned[rate].tokens_per_s - 1:+.1%}",
                *(f"{number:.2f}" for number in (planned[rate].turn_s, measured.turn_s)),
                *(f"{number:.0%}" for number in (planned[rate].found_share, measured.found_share)),
            ]
            for rate, measured in real.items()
        ]
        title = f"{self.replicas} replicas, agents of {TURNS} turns under a system prompt of {SYSTEM_TOKENS} tokens"
        worst = max(abs(measured.tokens_per_s / planned[rate].tokens_per_s - 1) for rate, measured in real.items())
        bars = {
            f"{rate:g} sessions/s": {"planned": planned[rate].tokens_per_s, "served": measured.tokens_per_s}
            for rate, measured in real.items()
        }
        return StudyAnswer(
            "What a plan predicts, and what real replicas serve",
            [TextTable(title, COLUMNS, rows)],
            [f"Tokens per second differ from the plan by at most {worst:.1%}."],
            [[Bars("four replicas, planned and served", "generated tokens per second", bars, beside=True)]],
        )


COLUMNS = (
    *("sessions/s", "turns/s planned", "served", "tokens/s planned", "served", "difference"),
    *("turn, mean s, planned", "served", "found, planned", "served"),
)


@final
class _RememberedFacts:
    """Makes the router that is served, and remembers what the first replica has measured."""

    def __init__(self) -> None:
        self._facts: ReplicaFacts | None = None

    def begin(self, facts: ReplicaFacts) -> RequestPlacer:
        """See `FleetFront`."""
        self._facts = facts
        return Router(facts.profile, chunk_tokens=facts.chunk_tokens)

    def kind(self, folder: Path) -> ReplicaKind:
        """The replica as `jinfercept plan --profile FILE` has it."""
        assert self._facts is not None
        profile = replace(self._facts.profile, tables={})
        profile.save(folder / "profile.json")
        host_tokens = int(_ENGINE["swap_space"] * 2**30 / profile.kv_bytes_per_token)
        sizes = {name: _ENGINE[name] for name in ("max_model_len", "max_num_seqs")} | {"policy": "copy_ahead"}
        return profile_kind(str(folder / "profile.json"), _ENGINE["kv_tokens"], host_tokens, 1.0, **sizes)


def plan_truth_command(truth: PlanTruth, out: str | None) -> int:
    """Serve, simulate, print and write; returns 0. Raises `ConfigError` if the options make no sense."""
    for flag, value, least in (("--replicas", truth.replicas, 1), ("--seconds", truth.seconds, 1.0)):
        check_least(flag, value, least)
    answer = truth.run()
    answer.show()
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        print(f"\nwritten: {', '.join(map(str, answer.write(Path(out), 'plan_truth')))}")
    return 0
