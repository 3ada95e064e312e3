"""The models that a suite measures: large ones, and small ones with layers of their kinds. Imports no JAX."""

from dataclasses import replace

from jinfercept.models.config import PLAIN_KIND, DeltaNetConfig, ExpertsConfig, LayerKind, ModelConfig, RopeConfig

GPTJ_6B = ModelConfig(
    family="gptj",
    vocab_size=50400,
    hidden_size=4096,
    num_layers=28,
    num_heads=16,
    num_kv_heads=16,
    head_dim=256,
    ffn_size=16384,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=64, interleaved=True),
    tie_embeddings=False,
    max_position=8192,  # trained with 2,048; contexts here are longer, and weights random
    eos_token_ids=(),
    activation="gelu_new",
)
LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0, rotary_dim=128),
    tie_embeddings=False,
    max_position=8192,
    eos_token_ids=(),
    activation="silu",
)
LLAMA_3_2_3B = replace(
    LLAMA_3_8B, hidden_size=3072, num_layers=28, num_heads=24, ffn_size=8192, tie_embeddings=True, max_position=131_072
)
SMALL_GPTJ = replace(
    GPTJ_6B,
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=128,
    rope=RopeConfig(theta=10_000.0, rotary_dim=8, interleaved=True),
    max_position=512,
)
SMALL_LLAMA = replace(
    LLAMA_3_8B,
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    rope=RopeConfig(theta=10_000.0, rotary_dim=16),
    max_position=512,
)
SMALL_GEMMA2 = replace(
    SMALL_LLAMA,
    family="gemma",
    activation="gelu_new",
    post_norms=True,
    kinds=(LayerKind(window=24), PLAIN_KIND),
    soft_cap=2.0,
    logit_cap=3.0,
    tie_embeddings=True,
)
SMALL_GPT_OSS = replace(
    SMALL_LLAMA,
    kinds=(LayerKind(window=24), PLAIN_KIND),
    sinks=True,
    qkv_bias=True,
    o_bias=True,
    experts=ExpertsConfig(8, 2, 64, normalised=True, swiglu=(7.0, 1.702), biased=True),
)
SMALL_QWEN3_NEXT = replace(
    SMALL_LLAMA,
    family="qwen3_next",
    qk_norm=True,
    kinds=(LayerKind(is_recurrent=True), PLAIN_KIND),
    experts=ExpertsConfig(8, 2, 64, normalised=True, shared_ffn_size=64),
    attention_gate=True,
    delta_net=DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, num_taps=4),
)
