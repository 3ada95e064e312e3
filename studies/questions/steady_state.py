"""Machines of data sheets with models of published sizes, and the requests per second that they carry on paper.

In a steady state `N` sequences decode. A request decodes in `decoded` steps, so `N / decoded` requests end at every step, and
as many begin: a step has `N · computed / decoded` query tokens. The rate is `N / (decoded · seconds of such a step)`. `N` is
the largest for which a step holds its tokens, and the pool the contexts that run and those that are kept while they are paused.
No queueing and no chance: a simulated engine reaches less. Every machine gets a load of the same share of its rate.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import fmean
from typing import NamedTuple

from jinfercept.engine.meter.counts import LatencyLimits
from jinfercept.sched.profile import Profile
from jinfercept.sched.roofline import (
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    LLAMA_13B,
    QWEN_32B,
    ProfiledModel,
    roofline,
)
from jinfercept.sim.arrivals import Arrival, arrivals
from jinfercept.sim.simulation import Simulation
from jinfercept.sim.sweep import SimulatedLoad
from jinfercept.sim.workload import Script, Segment, draw

LLAMA_3_1B = ProfiledModel("llama-3.2-1b", 1.236e9, num_layers=16, num_kv_heads=8, head_dim=64, hidden_size=2048)
_ROUNDS = 60
"""Of a bisection: more change no digit."""


class Demand(NamedTuple):
    """What one request of a workload needs, on average.

    Attributes:
        computed: query tokens, each once, without those that a cached prefix has.
        pairs: of a query token and a token that it attends to, in prefill.
        decoded: generated tokens.
        read: context tokens that a decode step reads.
        memory: those of them that no other request shares.
        paused_token_s: unshared context tokens times the seconds of the calls during which they are paused.
        dropped: unshared context tokens at the calls, added up: what is computed again if every pause loses its context.
        dropped_pairs: the pairs of that.
        common: tokens that requests share, held once for all of them.
    """

    computed: float
    pairs: float
    decoded: float
    read: float
    memory: float
    paused_token_s: float
    dropped: float
    dropped_pairs: float
    common: float = 0.0


def demand(scripts: Sequence[Script], shared_prefix: float = 0.0) -> Demand:
    """The mean demand of requests.

    Args:
        scripts: the requests, at least one.
        shared_prefix: share of every prompt that other requests keep cached: it is read, but neither computed nor counted as
            memory.
    """
    prompts = defaultdict[str, list[int]](list)
    for script in scripts:
        prompts[script.kind].append(script.prompt)
    common = shared_prefix * sum(map(fmean, prompts.values()))
    return Demand(*map(fmean, zip(*(_demand(script, shared_prefix) for script in scripts), strict=True)))._replace(
        common=common
    )


def _demand(script: Script, shared_prefix: float) -> Demand:
    shared = shared_prefix * script.prompt
    context, pairs = float(script.prompt), (script.prompt**2 - shared**2) / 2
    read = paused = dropped = dropped_pairs = 0.0
    for segment in script.segments:
        read += segment.decode * (context + segment.decode / 2)
        context += segment.decode
        if segment.call_s is not None:
            paused += segment.call_s * (context - shared)
            dropped += context - shared
            dropped_pairs += (context**2 - shared**2) / 2
        pairs += segment.returned * (context + segment.returned / 2)
        context += segment.returned
    decoded = script.generated
    return Demand(
        context - shared, pairs, decoded, read / decoded, read / decoded - shared, paused, dropped, dropped_pairs
    )


def with_kv_bytes(profile: Profile, times: float) -> Profile:
    """A `roofline` with so many times the bytes of KV per token: other numbers of KV heads, or quantised KV.

    Reading contexts, the tokens that the link moves, and those that the pool holds change; weights and operations do not.
    """
    derived = profile.tables["derived"]
    return replace(
        profile,
        name=f"{profile.name}-kv-{times:.4g}x",
        per_context_s=profile.per_context_s * times,
        link_out_tokens_per_s=profile.link_out_tokens_per_s / times,
        link_in_tokens_per_s=profile.link_in_tokens_per_s / times,
        link_both_tokens_per_s=profile.link_both_tokens_per_s / times,
        kv_bytes_per_token=round(profile.kv_bytes_per_token * times),
        tables={"derived": derived | {"kv_tokens": int(derived["kv_tokens"] / times)}},
    )


class SteadyState(NamedTuple):
    """An engine that runs full.

    Attributes:
        rate: requests per second.
        running: sequences that decode.
        step_s: seconds of a step.
    """

    rate: float
    running: float
    step_s: float


def steady_state(
    profile: Profile, need: Demand, kv_tokens: float, step_tokens: int, *, keeps: bool = False
) -> SteadyState:
    """The steady state of a machine.

    Args:
        profile: prices the steps.
        need: of the mean request.
        kv_tokens: tokens of the pool, more than requests have in common.
        step_tokens: most query tokens of a step.
        keeps: paused contexts stay in the pool; else they take no memory.
    """

    def at(running: float) -> SteadyState:
        ended = running / need.decoded
        step_s = profile.step_s(round(ended * need.computed), round(running * need.read))
        step_s += profile.per_pair_s * ended * need.pairs
        return SteadyState(ended / step_s, running, step_s)

    low, high = 0.0, step_tokens * need.decoded / need.computed
    for _ in range(_ROUNDS):
        running = (low + high) / 2
        state = at(running)
        memory = need.common + running * need.memory + (state.rate * need.paused_token_s if keeps else 0.0)
        low, high = (running, high) if memory <= kv_tokens else (low, running)
    return at(low)


class PaperRates(NamedTuple):
    """Requests per second that an engine reaches on paper, by what becomes of paused contexts.

    Attributes:
        free: they vanish and come back at no cost: no policy does better.
        kept: all stay on the device.
        dropped: all are computed again.
        swapped: all move to the host and back, hidden behind compute, as far as the link goes.
    """

    free: float
    kept: float
    dropped: float
    swapped: float

    @property
    def most_gain(self) -> float:
        """Upper bound on the gain in load of any policy for pauses over the better of always keeping and always dropping."""
        return self.free / max(self.kept, self.dropped)


def paper_rates(profile: Profile, need: Demand, kv_tokens: float, step_tokens: int) -> PaperRates:
    """The rates of a machine; see `steady_state` for the arguments."""
    again = need._replace(computed=need.computed + need.dropped, pairs=need.pairs + need.dropped_pairs)
    free = steady_state(profile, need, kv_tokens, step_tokens).rate
    link = profile.link_both_tokens_per_s / (2 * need.dropped) if need.dropped else free
    return PaperRates(
        free,
        steady_state(profile, need, kv_tokens, step_tokens, keeps=True).rate,
        steady_state(profile, again, kv_tokens, step_tokens).rate,
        min(free, link),
    )


def most_over_keeping(need: Demand, step_s: float) -> float:
    """Bound by memory: `free / kept ≤ 1 + W / (H · G · t)`, whatever the pool and the bytes of a token.

    A pool of K tokens holds `K / H` running contexts, or, at a rate `λ = N / (G · t)`, `N` of them beside `λ · W` tokens of
    paused ones.

    Args:
        need: of the mean request: W is `paused_token_s`, H `memory`, G `decoded`.
        step_s: t, seconds of a step of the engine that keeps.
    """
    return 1.0 + need.paused_token_s / (need.memory * need.decoded * step_s)


def most_over_dropping(need: Demand) -> float:
    """Bound by compute: `free / dropped ≤ 1 + D / X`, or the same in pairs of tokens if there recomputation takes more.

    Args:
        need: of the mean request: X is `computed`, D `dropped`.
    """
    return 1.0 + max(need.dropped / need.computed, need.dropped_pairs / need.pairs)


LONGER = 4
"""Prompts and results of calls have so many times the tokens of the mix of InferCept's trace, whose window was 2,048."""
MAX_MODEL_LEN = 9216
PAGE_SIZE = 64
HOST = 4
"""Tokens of the host pool per token of the device pool."""
SLACK = 3.0
"""A request counts as goodput within so many times what it takes at a full engine: see `Deployment.limits`."""
SAMPLES = 4000
"""Scripts behind the mean demand."""


class Deployment(NamedTuple):
    """A model on accelerators.

    Attributes:
        label: in tables.
        model: is grouped-query if it has fewer KV heads than query heads.
        profile: a roofline.
    """

    label: str
    model: ProfiledModel
    profile: Profile

    @property
    def kv_tokens(self) -> int:
        """Tokens of the device pool: what the weights leave."""
        return self.profile.tables["derived"]["kv_tokens"]

    def full_rate(self, need: Demand) -> float:
        """Requests per second that it carries on paper, in steps of S tokens, if paused contexts cost nothing."""
        return steady_state(self.profile, need, self.kv_tokens, self.profile.saturation).rate

    def limits(self, need: Demand) -> LatencyLimits:
        """`SLACK` times the seconds in which an empty engine computes the longest prompt, and times a step of the full one."""
        profile = self.profile
        full = steady_state(profile, need, self.kv_tokens, profile.saturation)
        return LatencyLimits(SLACK * profile.recompute_s(MAX_MODEL_LEN, profile.saturation), SLACK * full.step_s)

    def simulation(self, policy: str, duration_s: float, need: Demand) -> Simulation:
        """One engine for all policies: chunked prefill, transfers behind compute, durations estimated from the history.

        Args:
            policy: of paused contexts.
            duration_s: of arrivals; requests have five times as long again to finish, since conversations last for minutes.
            need: of the mean request.
        """
        return Simulation(
            self.profile,
            policy,
            "history",
            3 * duration_s,
            kv_tokens=self.kv_tokens,
            host_tokens=HOST * self.kv_tokens,
            page_size=PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
            chunked_prefill=True,
            overlaps=True,
            limits=self.limits(need),
        )


def deployed(model: ProfiledModel, accelerator: str, num_devices: int = 1) -> Deployment:
    """A deployment; raises as `roofline` does."""
    count = f"{num_devices} × " if num_devices > 1 else ""
    return Deployment(
        f"{model.name}, {count}{accelerator}", model, roofline(model, accelerator, num_devices, attention=True)
    )


DEPLOYMENTS = (
    deployed(LLAMA_3_1B, "T4"),
    deployed(LLAMA_2_7B, "A40"),
    deployed(LLAMA_3_8B, "A40"),
    deployed(LLAMA_3_8B, "L40S"),
    deployed(LLAMA_13B, "L40S", 2),
    deployed(LLAMA_2_7B, "A100-80GB"),
    deployed(LLAMA_3_8B, "A100-80GB"),
    deployed(LLAMA_3_70B, "A100-80GB", 4),
    deployed(LLAMA_13B, "H100"),
    deployed(LLAMA_3_8B, "H100"),
    deployed(LLAMA_3_70B, "H100", 4),
    deployed(QWEN_32B, "H200"),
    deployed(LLAMA_3_70B, "B200"),
    deployed(LLAMA_2_7B, "TPU-v5e", 4),
    deployed(LLAMA_3_8B, "TPU-v6e"),
    deployed(QWEN_32B, "TPU-v6e", 4),
)
"""The deployments of the study, from the slowest family of accelerators on."""


def longer(script: Script, times: int = LONGER) -> Script:
    """A request whose prompt and results have so many times the tokens; it generates as many as before."""
    segments = (Segment(segment.decode, segment.call_s, segment.returned * times) for segment in script.segments)
    return Script(script.kind, script.prompt * times, tuple(segments))


@cache
def mixed_demand(shared_prefix: float = 0.0) -> Demand:
    """The mean demand of the mix, with longer contexts."""
    rng = Random(0)
    return demand([longer(draw("mixed", rng)) for _ in range(SAMPLES)], shared_prefix)


def mixed_load(rate: float, duration_s: float, seed: int) -> SimulatedLoad[Sequence[Arrival]]:
    """Poisson arrivals of the mix, with longer contexts."""
    rng = Random(seed)
    drawn = arrivals(lambda: longer(draw("mixed", rng)), rate, duration_s, rng)
    return SimulatedLoad(f"mixed, contexts × {LONGER}", rate, seed, drawn)
