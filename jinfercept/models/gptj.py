"""GPT-J: one layer norm feeds attention and feed-forward in parallel, rotary on part of each head.

Weights lie `[in, out]`, queries, keys and values joined (`joined_weights.py`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import Attend, AttendJoined, layer_norm, project, separate_heads
from jinfercept.models.config import PLAIN_KIND, LayerKind, ModelConfig
from jinfercept.models.parallel import add_partial_sums, gather_columns, on_first_device
from jinfercept.models.rope import rotate, rotation


class GPTJLayer(nnx.Module):
    """Attention and feed-forward network side by side, both added to the stream."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, kind: LayerKind, joined: bool) -> None:
        assert kind == PLAIN_KIND, "layers of GPT-J are alike"
        self.config, self.joined = config, joined
        e, h, d, f = config.hidden_size, config.num_heads, config.head_dim, config.ffn_size
        self.norm = nnx.Param(jnp.zeros(e, dtype))
        self.norm_bias = nnx.Param(jnp.zeros(e, dtype))
        if joined:
            self.qkv = nnx.Param(jnp.zeros((e, h, 3, d), dtype))
        else:
            self.q = nnx.Param(jnp.zeros((e, h, d), dtype))
            self.k = nnx.Param(jnp.zeros((e, h, d), dtype))
            self.v = nnx.Param(jnp.zeros((e, h, d), dtype))
        self.o = nnx.Param(jnp.zeros((h, d, e), dtype))
        self.up = nnx.Param(jnp.zeros((e, f), dtype))
        self.up_bias = nnx.Param(jnp.zeros(f, dtype))
        self.down = nnx.Param(jnp.zeros((f, e), dtype))
        self.down_bias = nnx.Param(jnp.zeros(e, dtype))

    def __call__[KV](
        self, x: Float[Array, "T E"], positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T E"], KV]:
        rope = self.config.rope

        y = layer_norm(x, self.norm, self.norm_bias, self.config.norm_eps)
        if self.joined and isinstance(attend, AttendJoined):
            qkv = project("te,ekgd->tkgd", y, self.qkv)
            attended, kv = attend.joined(qkv, rotation(positions, rope), kv)
        else:
            q, k, v = self._heads(y)
            attended, kv = attend(rotate(q, positions, rope), rotate(k, positions, rope), v, kv)

        inner = jax.nn.gelu(project("te,ef->tf", y, self.up, self.up_bias), approximate=True)
        outer = project("tf,fe->te", inner, self.down) + on_first_device(self.down_bias[...])[None]
        return add_partial_sums(x, project("thd,hde->te", attended, self.o), outer), kv

    def _heads(
        self, y: Float[Array, "T E"]
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"], Float[Array, "T H D"]]:
        """Queries, keys and values."""
        if self.joined:
            return separate_heads(project("te,ekgd->tkgd", y, self.qkv))
        q, k, v = (project("te,ehd->thd", y, weight) for weight in (self.q, self.k, self.v))
        return q, k, v


class GPTJHead(nnx.Module):
    """The final norm and the logits, with a bias."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        e, v = config.hidden_size, config.vocab_size
        self.norm = nnx.Param(jnp.zeros(e, dtype))
        self.norm_bias = nnx.Param(jnp.zeros(e, dtype))
        self.unembed = nnx.Param(jnp.zeros((v, e), dtype))
        self.unembed_bias = nnx.Param(jnp.zeros(v, dtype))

    def __call__(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        y = layer_norm(x, self.norm, self.norm_bias, self.config.norm_eps)
        logits = project("re,ve->rv", y, self.unembed, self.unembed_bias, out=jnp.float32)
        return gather_columns(logits, self.config.vocab_size)
