"""Builds schedulers, for an engine and for a simulation alike."""

from dataclasses import dataclass
from typing import NamedTuple

from jinfercept.errors import ConfigError
from jinfercept.kv.manager import KVManager
from jinfercept.sched.door import Overload
from jinfercept.sched.estimator import Estimator
from jinfercept.sched.order import Order
from jinfercept.sched.orders import OrderChoice, make_order
from jinfercept.sched.policies import WHOLE_PROMPTS, PolicyChoice, PolicyInputs
from jinfercept.sched.policy import Policy
from jinfercept.sched.preemption import Preemption
from jinfercept.sched.profile import Profile
from jinfercept.sched.scheduler import Scheduler
from jinfercept.sched.speculation import NO_DRAFTS, SpeculationLimits


class SchedulerLimits(NamedTuple):
    """The limits of a step and of the running sequences."""

    buckets: tuple[int, ...]  # query tokens of the executables, ascending
    max_num_seqs: int
    max_model_len: int
    max_chunk_tokens: int | None = None  # query tokens of one sequence in one step; None: no limit of its own
    # None: chunked, unless the policy was published with whole prompts and a step holds the longest sequence
    chunked_prefill: bool | None = None
    preemption: Preemption = "policy"
    speculation: SpeculationLimits = NO_DRAFTS
    overload: Overload = "serve"

    def chunks(self, policy: PolicyChoice) -> bool:
        """Whether prefill is chunked under a policy. Raises `ConfigError` if no step holds whole prompts that are asked for."""
        fits = self.max_model_len <= self.buckets[-1] and self.max_chunk_tokens is None
        if self.chunked_prefill is False and not fits:
            raise ConfigError(
                "chunked_prefill can only be turned off where a step holds the longest sequence",
                got=f"steps of {self.buckets[-1]} tokens, sequences of {self.max_model_len}, "
                f"max_chunk_tokens={self.max_chunk_tokens}",
                fix="raise max_num_batched_tokens or lower max_model_len, and give no max_chunk_tokens",
            )
        if self.chunked_prefill is not None:
            return self.chunked_prefill
        return policy not in WHOLE_PROMPTS or not fits


@dataclass(frozen=True, slots=True)
class SchedulerBuild:
    """A scheduler that lacks only its pages."""

    inputs: PolicyInputs
    policy: Policy
    order: Order | None
    limits: SchedulerLimits
    chunks: bool

    def build(self, kv: KVManager) -> Scheduler:
        limits = self.limits
        return Scheduler(
            kv,
            self.policy,
            self.inputs.cost,
            self.inputs.estimator,
            buckets=limits.buckets,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            chunk_tokens=min(limits.max_chunk_tokens or limits.buckets[-1], limits.buckets[-1]),
            whole_prompts=not self.chunks,
            preemption=limits.preemption,
            order=self.order,
            overload=limits.overload,
            speculation=limits.speculation,
        )


def plan_scheduler(
    profile: Profile,
    estimator: Estimator,
    policy: PolicyChoice,
    limits: SchedulerLimits,
    page_size: int,
    order: OrderChoice = "fcfs",
) -> SchedulerBuild:
    """Makes the policy and the order of a scheduler. Raises `ConfigError` as `make_choice` and `SchedulerLimits.chunks`."""
    buckets = limits.buckets
    # S is the largest bucket up to the profile's saturation point, or the smallest bucket
    saturation = max((size for size in buckets if size <= profile.saturation), default=buckets[0])
    inputs = PolicyInputs(profile, saturation, page_size, estimator)
    return SchedulerBuild(inputs, inputs.make(policy), make_order(order, inputs), limits, limits.chunks(policy))
