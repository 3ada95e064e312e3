"""Machines of data sheets with models of published sizes, and a load for each: the same share of what it carries on paper."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import NamedTuple

from jinfercept.meter.counts import LatencyLimits
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
from studies.questions.steady_state import Demand, demand, steady_state

LLAMA_3_1B = ProfiledModel("llama-3.2-1b", 1.236e9, num_layers=16, num_kv_heads=8, head_dim=64, hidden_size=2048)
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


def deployment(model: ProfiledModel, accelerator: str, num_devices: int = 1) -> Deployment:
    """A deployment; raises as `roofline` does."""
    count = f"{num_devices} × " if num_devices > 1 else ""
    return Deployment(
        f"{model.name}, {count}{accelerator}", model, roofline(model, accelerator, num_devices, attention=True)
    )


DEPLOYMENTS = (
    deployment(LLAMA_3_1B, "T4"),
    deployment(LLAMA_2_7B, "A40"),
    deployment(LLAMA_3_8B, "A40"),
    deployment(LLAMA_3_8B, "L40S"),
    deployment(LLAMA_13B, "L40S", 2),
    deployment(LLAMA_2_7B, "A100-80GB"),
    deployment(LLAMA_3_8B, "A100-80GB"),
    deployment(LLAMA_3_70B, "A100-80GB", 4),
    deployment(LLAMA_13B, "H100"),
    deployment(LLAMA_3_8B, "H100"),
    deployment(LLAMA_3_70B, "H100", 4),
    deployment(QWEN_32B, "H200"),
    deployment(LLAMA_3_70B, "B200"),
    deployment(LLAMA_2_7B, "TPU-v5e", 4),
    deployment(LLAMA_3_8B, "TPU-v6e"),
    deployment(QWEN_32B, "TPU-v6e", 4),
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
