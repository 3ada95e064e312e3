"""What a scheduler is built with: its saturation point, its policy, chunked prefill or not."""

from dataclasses import replace

import pytest

from jinfercept.errors import ConfigError
from jinfercept.kv.manager import KVManager
from jinfercept.sched.build import SchedulerLimits, plan_scheduler
from jinfercept.sched.estimator import ElapsedEstimator
from jinfercept.sched.named_profiles import PROFILES
from jinfercept.sched.policy import preserve

PROFILE = replace(PROFILES["paper-gptj-6b-a100"], saturation=32)


@pytest.mark.parametrize(("buckets", "saturation"), [((8, 32, 64), 32), ((8, 24, 64), 24), ((48, 64), 48)])
def test_the_saturation_point_is_the_largest_bucket_up_to_the_profiles_or_the_smallest(
    buckets: tuple[int, ...], saturation: int
) -> None:
    build = plan_scheduler(PROFILE, ElapsedEstimator(), "min_waste", SchedulerLimits(buckets, 4, 64), 4)
    assert build.inputs.saturation == saturation


def test_prefill_is_chunked_as_the_policy_was_published_where_the_largest_step_holds_the_longest_sequence() -> None:
    limits = SchedulerLimits((8, 64), 4, 64)
    assert not limits.chunks("discard")
    assert limits.chunks("copy_ahead")
    assert limits.chunks(preserve())
    assert limits._replace(max_model_len=65).chunks("discard")
    with pytest.raises(ConfigError, match="chunked_prefill"):
        limits._replace(max_model_len=65, chunked_prefill=False).chunks("discard")


def test_a_policy_of_ones_own_is_taken_as_it_is() -> None:
    policy = preserve()
    build = plan_scheduler(PROFILE, ElapsedEstimator(), policy, SchedulerLimits((8, 64), 4, 64), 4)
    assert build.policy is policy
    assert build.build(KVManager(20, 0, 4)).protects_paused == policy.protects_paused
