"""Models whose sizes are published, for rooflines, and the KV pools of the machines in the InferCept paper."""

from collections.abc import Mapping

from jinfercept.sched.roofline import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_13B, QWEN_32B, ProfiledModel

LLAMA_3_1B = ProfiledModel("llama-3.2-1b", 1.236e9, num_layers=16, num_kv_heads=8, head_dim=64, hidden_size=2048)

MODELS: Mapping[str, ProfiledModel] = {
    model.name: model for model in (LLAMA_3_1B, LLAMA_2_7B, LLAMA_3_8B, LLAMA_13B, QWEN_32B, LLAMA_3_70B)
}
"""By name; another model needs a measured profile."""
PAPER_KV_TOKENS: Mapping[str, int] = {"paper-gptj-6b-a100": 53_000, "paper-vicuna-13b-2xa100": 56_000}
"""Device pools of the paper's machines, which the paper does not give: what 90 % of 40 GB cards leaves beside the weights."""
