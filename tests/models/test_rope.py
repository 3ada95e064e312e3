"""Rotary embedding against complex multiplication, and what scaling does to fast and slow pairs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept.models.config import RopeConfig
from jinfercept.models.hf_config import config_from_hf
from jinfercept.models.rope import frequencies, rotate


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_turned_by_its_position(interleaved):
    rope = RopeConfig(theta=100.0, rotary_dim=8, interleaved=interleaved)
    x = np.random.default_rng(0).standard_normal((3, 2, 12)).astype(np.float32)
    positions = np.array([0, 5, 1000])
    first, second = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    turned = (first + 1j * second) * np.exp(1j * positions[:, None, None] * frequencies(rope).astype(np.float64))

    ours = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions), rope))
    got_first, got_second = (ours[..., 0:8:2], ours[..., 1:8:2]) if interleaved else (ours[..., :4], ours[..., 4:8])
    np.testing.assert_allclose(got_first + 1j * got_second, turned, atol=2e-4)
    np.testing.assert_array_equal(ours[..., 8:], x[..., 8:])


def test_bfloat16_heads_are_turned_in_float32():
    rope = RopeConfig(theta=10_000.0, rotary_dim=4)
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    ours = rotate(x, jnp.array([4001]), rope)  # 4001 is not a bfloat16
    exact = rotate(x.astype(jnp.float32), jnp.array([4001]), rope)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_scaling_keeps_the_fastest_pair_and_divides_the_slowest(scaling):
    plain = RopeConfig(theta=500_000.0, rotary_dim=64)
    scaled = RopeConfig(theta=500_000.0, rotary_dim=64, scaling=scaling, factor=8.0, original_max_position=8192)
    ratio = frequencies(plain) / frequencies(scaled)
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(8.0)
    assert (np.diff(ratio) >= -1e-5).all()


YARN_LLAMA_2_7B_64K = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True},
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_yarn_llama_2_7b_64k_turns_its_pairs_as_the_authors_of_yarn_do() -> None:
    """Against the formula of YaRN (arXiv 2309.00071) pair by pair, in plain Python; `llama_yarn` holds it to transformers."""
    config = config_from_hf(YARN_LLAMA_2_7B_64K)
    assert (config.max_position, config.num_layers, config.num_kv_heads, config.head_dim) == (65536, 32, 32, 128)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(16) + 1)

    def pair_that_turns(times: float) -> float:
        return 128 * math.log(4096 / (times * 2 * math.pi)) / (2 * math.log(10_000))

    low, high = math.floor(pair_that_turns(32)), math.ceil(pair_that_turns(1))
    assert (low, high) == (20, 46)
    expected = []
    for pair in range(64):
        extrapolated = 10_000 ** (-2 * pair / 128)
        interpolated = extrapolated / 16
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        expected.append(interpolated * ramp + extrapolated * (1 - ramp))
    np.testing.assert_allclose(frequencies(config.rope), expected, rtol=1e-6)
