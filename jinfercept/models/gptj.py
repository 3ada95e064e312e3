"""GPT-J: one layer norm feeds attention and feed-forward in parallel, rotary on part of each head. Weights lie `[in, out]`,
queries, keys and values joined (`joined_weights.py`)."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import Attend, AttendJoined, Block, layer_norm, project
from jinfercept.models.config import PLAIN_KIND, LayerKind, ModelConfig
from jinfercept.models.llama import LlamaHead, heads_of
from jinfercept.models.parallel import add_partial_sums, gather_columns, on_first_device
from jinfercept.models.rope import rotate, rotation


class GPTJLayer(Block):
    """Attention and feed-forward network side by side, both added to the stream."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        assert kind == PLAIN_KIND, "layers of GPT-J are alike"
        self.config, self.joined = config, joined
        heads = ("qkv",) if joined else ("q", "k", "v")
        names = ("norm", "norm_bias", *heads, "o", "up", "up_bias", "down", "down_bias")
        self.make_weights(names, config, dtype)

    def __call__[KV](
        self, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        rope = self.config.rope

        y = layer_norm(x, self.norm, self.norm_bias, self.config.norm_eps)
        if self.joined and isinstance(attend, AttendJoined):
            qkv = project("te,ekgd->tkgd", y, self.qkv)
            attended, kv = attend.joined(qkv, rotation(positions, rope), kv)
        else:
            q, k, v = heads_of(self, y)
            attended, kv = attend(rotate(q, positions, rope), rotate(k, positions, rope), v, kv)

        inner = jax.nn.gelu(project("te,ef->tf", y, self.up, self.up_bias), approximate=True)
        outer = project("tf,fe->te", inner, self.down) + on_first_device(self.down_bias[...])[None]
        return add_partial_sums(x, project("thd,hde->te", attended, self.o), outer), kv


class GPTJHead(LlamaHead):
    """The final norm and the logits, with biases."""

    names = ("norm", "norm_bias", "unembed", "unembed_bias")

    def __call__(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        y = layer_norm(x, self.norm, self.norm_bias, self.config.norm_eps)
        logits = project("re,ve->rv", y, self.unembed, self.unembed_bias, out=jnp.float32)
        return gather_columns(logits, self.config.vocab_size)
