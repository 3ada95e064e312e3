"""Rooflines of models with experts: a step reads the experts in use."""

import numpy as np
import pytest

from jinfercept.sched.roofline import LLAMA_3_8B, ProfiledExperts, ProfiledModel, experts_in_use, roofline

QWEN3_30B_A3B = ProfiledModel(
    "qwen3-30b-a3b",
    30.532e9,
    num_layers=48,
    num_kv_heads=4,
    head_dim=128,
    hidden_size=2048,
    experts=ProfiledExperts(48 * 128 * 3 * 2048 * 768, num_experts=128, per_token=8),
)


@pytest.mark.parametrize(("count", "per_token", "num_tokens"), [(8, 2, 1), (8, 2, 3), (128, 8, 16), (32, 4, 64)])
def test_experts_in_use_are_as_many_as_even_draws_use(count: int, per_token: int, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    ranks = rng.random((2000, num_tokens, count)).argsort(axis=-1)[..., :per_token]
    used = [len(np.unique(draw)) for draw in ranks]
    spread = np.std(used) / len(used) ** 0.5
    assert experts_in_use(count, per_token, num_tokens) == pytest.approx(np.mean(used), abs=4 * spread + 1e-9)


def test_a_step_costs_the_experts_that_it_reads_until_it_costs_what_it_computes() -> None:
    profile = roofline(QWEN3_30B_A3B, "H100")
    assert QWEN3_30B_A3B.active_params == pytest.approx(3.35e9, rel=0.01)  # as its card says
    least, few, many = (profile.step_s(tokens, 0) for tokens in (1, 16, 1024))
    assert least == profile.flat_s
    assert few / least == pytest.approx(QWEN3_30B_A3B.read_params(16) / QWEN3_30B_A3B.active_params)
    assert many == pytest.approx(QWEN3_30B_A3B.params / QWEN3_30B_A3B.active_params * least, rel=0.01)
    assert profile.step_s(8192, 0) > 1.5 * many  # more than the largest bucket: several steps
    assert profile.saturation > 5 * roofline(LLAMA_3_8B, "H100").saturation
    assert not roofline(LLAMA_3_8B, "H100").bucket_tokens
