"""`python -m benchmarks moe`: decode and prefill of a small model with experts on this machine, beside transformers.

The model is a Qwen3-MoE of random weights, written to a temporary folder that both engines load; the command
`throughput` measures them one after the other.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np

from benchmarks.throughput import Throughput
from jinfercept.cli.options import HOSTS, Maybe, Several, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.sim.tables import check_least

VOCAB_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 2048, 64, 8, 4


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The command."""

    transformers: Maybe[str] = None
    """an interpreter that has torch and transformers: measure them, too"""
    layers: int = 4
    hidden: int = 512
    """numbers of a token between layers"""
    ffn: int = 256
    """columns of an expert"""
    experts: int = 32
    """of a layer"""
    per_token: int = 4
    """experts that compute a token"""
    dtype: Several = ()
    """float32, bfloat16 (default: both)"""
    batch: Several = ()
    """requests at once (default: 1,8)"""
    context: Several = ()
    """prompt tokens (default: 32,256)"""
    json: Maybe[str] = None
    """write everything to this file"""
    engine: Annotated[
        EngineOptions,
        engine_flags("dtype", "kv_tokens", "max_num_seqs", "max_model_len", "enable_prefix_caching", *HOSTS),
    ]

    def run(self) -> int:
        """Measure, and print a table; returns 0. Raises `ConfigError` as `Throughput` does."""
        for name in ("layers", "hidden", "ffn", "experts", "per_token"):
            check_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            command = Throughput(
                model=folder,
                dtype=self.dtype,
                batch=self.batch or ("1,8",),
                context=self.context or ("32,256",),
                peer=() if self.transformers is None else (f"transformers={self.transformers}",),
                json=self.json,
                engine=self.engine,
            )
            return command.run()

    def _write(self, folder: Path) -> None:
        """The checkpoint. One layer's experts are drawn, which all layers have in another order."""
        from safetensors.numpy import save_file

        rng, expert_sizes = np.random.default_rng(0), {"gate": (self.ffn, self.hidden), "up": (self.ffn, self.hidden)}
        expert_sizes["down"] = (self.hidden, self.ffn)

        def drawn(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)

        def ones(*shape: int) -> np.ndarray:
            return np.ones(shape, ml_dtypes.bfloat16)

        own = [{side: drawn(*size) for side, size in expert_sizes.items()} for _ in range(self.experts)]
        tensors = {"model.embed_tokens.weight": drawn(VOCAB_SIZE, self.hidden), "model.norm.weight": ones(self.hidden)}
        tensors["lm_head.weight"] = drawn(VOCAB_SIZE, self.hidden)
        heads = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS}
        for i in range(self.layers):
            layer = {f"self_attn.{name}_proj": drawn(count * HEAD_DIM, self.hidden) for name, count in heads.items()}
            layer["self_attn.o_proj"] = drawn(self.hidden, NUM_HEADS * HEAD_DIM)
            layer |= {f"self_attn.{name}_norm": ones(HEAD_DIM) for name in "qk"}
            layer |= {f"{name}_layernorm": ones(self.hidden) for name in ("input", "post_attention")}
            layer["mlp.gate"] = drawn(self.experts, self.hidden)
            for number, place in enumerate(rng.permutation(self.experts)):
                layer |= {f"mlp.experts.{number}.{side}_proj": weight.copy() for side, weight in own[place].items()}
            tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._config()))

    def _config(self) -> Mapping[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "moe_intermediate_size": self.ffn,
            "num_experts": self.experts,
            "num_experts_per_tok": self.per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": self.layers,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        }
