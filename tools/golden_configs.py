"""Configs of the tiny checkpoints that `golden.py` makes, and their variants."""

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 128
SEQUENCE_LENGTHS = (64, 20)

LLAMA_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
IMAGE_ROPE = {**SHORT_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
GPTJ_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 64,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GEMMA4_SHAPE = {
    **LLAMA_SHAPE,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 20,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "tie_word_embeddings": True,
}
GEMMA4_LARGE = {
    **GEMMA4_SHAPE,
    "num_hidden_layers": 3,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SMALL = {
    **GEMMA4_SHAPE,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
}
NEMOTRON_SHAPE = {
    **{key: value for key, value in LLAMA_SHAPE.items() if key != "num_hidden_layers"},
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
YARN_LINES = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}  # as model cards advise
TINY_CONFIGS = {
    "llama_gqa": LlamaConfig(**{**LLAMA_SHAPE, "num_hidden_layers": 3, "head_dim": 8, "eos_token_id": [2, 5]}),
    "llama_tied": LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama_linear": LlamaConfig(
        **LLAMA_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama_llama3": LlamaConfig(
        **LLAMA_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_yarn": LlamaConfig(
        **LLAMA_SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_mha": LlamaConfig(**{**LLAMA_SHAPE, "num_key_value_heads": 4, "head_dim": 8}, rms_norm_eps=1e-5),  # Llama 2
    "mistral": MistralConfig(**LLAMA_SHAPE, sliding_window=None, rope_parameters=SHORT_ROPE),
    "qwen2": Qwen2Config(**{**LLAMA_SHAPE, "head_dim": 8}, tie_word_embeddings=True, rope_parameters=SHORT_ROPE),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "mixtral": MixtralConfig(
        **{**LLAMA_SHAPE, "head_dim": 8, "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **{**LLAMA_SHAPE, "head_dim": 8},
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=SHORT_ROPE,
    ),
    "qwen3_moe_mixed": Qwen3MoeConfig(
        **{**LLAMA_SHAPE, "head_dim": 8, "num_hidden_layers": 4},
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        use_sliding_window=True,
        sliding_window=20,
        rope_parameters=SHORT_ROPE,
    ),
    "glm4_moe": Glm4MoeConfig(
        **{**LLAMA_SHAPE, "num_hidden_layers": 3},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters={**SHORT_ROPE, "partial_rotary_factor": 0.5},
    ),
    "qwen3_next": Qwen3NextConfig(
        **{**LLAMA_SHAPE, "num_hidden_layers": 4},
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        rope_parameters={**SHORT_ROPE, "partial_rotary_factor": 0.5},
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **{**LLAMA_SHAPE, "num_hidden_layers": 3},
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=4,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=True,
        rope_parameters=IMAGE_ROPE,
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{key: value for key, value in LLAMA_SHAPE.items() if key != "intermediate_size"},
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters=IMAGE_ROPE,
    ),
    "nemotron_h": NemotronHConfig(**NEMOTRON_SHAPE, hybrid_override_pattern="*EMM-"),
    "nemotron_h_latent": NemotronHConfig(**NEMOTRON_SHAPE, moe_latent_size=8, hybrid_override_pattern="-*-EM"),  # Super
    "olmo2": Olmo2Config(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "olmo3": Olmo3Config(
        **LLAMA_SHAPE | {"num_hidden_layers": 5},
        sliding_window=20,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "phi3": Phi3Config(
        **{**LLAMA_SHAPE, "head_dim": 8}, pad_token_id=0, rope_parameters={**SHORT_ROPE, "partial_rotary_factor": 0.75}
    ),
    "granite": GraniteConfig(
        **LLAMA_SHAPE,
        rope_parameters=SHORT_ROPE,
        attention_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.15,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "smollm3": SmolLM3Config(
        **{**LLAMA_SHAPE, "num_hidden_layers": 3, "head_dim": 8},
        pad_token_id=0,
        rope_parameters=SHORT_ROPE,
        no_rope_layer_interval=2,
    ),
    "gpt_oss": GptOssConfig(
        **LLAMA_SHAPE | {"head_dim": 8, "intermediate_size": 16},
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=20,
        swiglu_limit=2.0,
        rope_parameters={**YARN_LINES, "rope_theta": 500.0, "truncate": False},
    ),
    "gpt_oss_mxfp4": GptOssConfig(
        **LLAMA_SHAPE | {"hidden_size": 64, "intermediate_size": 64},
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=20,
        swiglu_limit=7.0,
        rope_parameters={**YARN_LINES, "rope_theta": 500.0, "truncate": False},
    ),
    "gemma": GemmaConfig(**LLAMA_SHAPE, rope_parameters=SHORT_ROPE),
    "gemma2": Gemma2Config(
        **LLAMA_SHAPE,
        rope_parameters=SHORT_ROPE,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **LLAMA_SHAPE | {"num_hidden_layers": 3},
        sliding_window=20,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma4": Gemma4TextConfig(**GEMMA4_LARGE),  # as 31B
    "gemma4_moe": Gemma4TextConfig(  # as 26B-A4B
        **GEMMA4_LARGE, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=16
    ),
    "gemma4_e4b": Gemma4TextConfig(**GEMMA4_SMALL),
    "gemma4_e2b": Gemma4TextConfig(**GEMMA4_SMALL | {"num_key_value_heads": 1}, use_double_wide_mlp=True),
    "mistral_windowed": MistralConfig(**LLAMA_SHAPE, sliding_window=20, rope_parameters=SHORT_ROPE),
    "ministral3": Ministral3Config(
        **LLAMA_SHAPE,
        rope_parameters={
            **YARN_LINES,
            "rope_theta": 500.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gptj": GPTJConfig(**GPTJ_SHAPE),
    "gptj_published": GPTJConfig(**GPTJ_SHAPE),
}
GEMMA4_DRAFTING = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"],
}
ASSISTANTS = {  # the checkpoint that each of them drafts for, and its config
    "gemma4_assistant": (
        "gemma4",
        Gemma4AssistantConfig(text_config=Gemma4TextConfig(**GEMMA4_LARGE | GEMMA4_DRAFTING), backbone_hidden_size=32),
    ),
    "gemma4_e2b_assistant": (
        "gemma4_e2b",
        Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**GEMMA4_SHAPE | GEMMA4_DRAFTING | {"num_key_value_heads": 1}),
            backbone_hidden_size=32,
            use_ordered_embeddings=True,
            num_centroids=16,
            centroid_intermediate_top_k=4,
        ),
    ),
}
NUM_DRAFTS = 3
VARIANTS = {  # checkpoint, changes of its config (null removes a key), tensors that are added by name and shape
    "rope_scaling beside rope_parameters": ("llama_linear", {"rope_scaling": YARN_LINES}, {}),
    "rope_scaling beside rope_parameters and rope_theta": (
        "qwen3",
        {"rope_scaling": YARN_LINES, "rope_theta": 700.0},
        {},
    ),
    "an empty rope_scaling": ("llama_yarn", {"rope_scaling": {}}, {}),
    "theta in rope_scaling": (
        "mistral",
        {"rope_scaling": {**YARN_LINES, "rope_theta": 300.0}, "rope_theta": 700.0},
        {},
    ),
    "original length beside the rope": (
        "llama_llama3",
        {"original_max_position_embeddings": 16},
        {},
    ),
    "yarn with mscale, without truncation": (
        "llama_yarn",
        {
            "rope_parameters": {
                **YARN_LINES,
                "rope_theta": 500.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
        {},
    ),
    "yarn with attention_factor": (
        "llama_yarn",
        {"rope_parameters": {**YARN_LINES, "rope_theta": 500.0, "attention_factor": 0.8}},
        {},
    ),
    "yarn without factor": ("llama_yarn", {"rope_parameters": {**YARN_LINES, "rope_theta": 500.0, "factor": None}}, {}),
    "dynamic": ("llama_linear", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, {}),
    "proportional": (
        "llama_gqa",
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.7,
                "factor": 2.0,
            }
        },
        {},
    ),
    "longrope": (
        "llama_mha",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            }
        },
        {},
    ),
    "longrope of phi3": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [2.0, 3.0, 5.0],
            },
        },
        {},
    ),
    "longrope of phi3 beyond the original length": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "su",
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 5.0],
            },
        },
        {},
    ),
    "no rms_norm_eps": ("llama_mha", {"rms_norm_eps": None}, {}),
    "swish": ("llama_gqa", {"hidden_act": "swish"}, {}),
    "attention_bias and mlp_bias": (
        "llama_gqa",
        {"attention_bias": True, "mlp_bias": True},
        {
            f"model.layers.{i}.{name}_proj.bias": [size]
            for i in range(3)
            for name, size in {
                "self_attn.q": 32,
                "self_attn.k": 16,
                "self_attn.v": 16,
                "self_attn.o": 32,
                "mlp.gate": 64,
                "mlp.up": 64,
                "mlp.down": 32,
            }.items()
        },
    ),
    "factors of experts that are not normalised": ("qwen3_moe", {"norm_topk_prob": False}, {}),
    "attention_bias of qwen3": (
        "qwen3",
        {"attention_bias": True},
        {
            f"model.layers.{i}.self_attn.{name}_proj.bias": [size]
            for i in range(2)
            for name, size in {"q": 64, "k": 32, "v": 32, "o": 32}.items()
        },
    ),
    "tied, with another head stored": ("llama_tied", {}, {"lm_head.weight": [VOCAB_SIZE, 32]}),
}
