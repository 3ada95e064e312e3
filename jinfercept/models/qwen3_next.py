"""Qwen3-Next: three recurrent layers with a gated delta rule, then one of gated attention; experts with a shared one.

Norms multiply by one plus their weight, as Gemma's do. Attention's results are multiplied by gates, and a part of each head is
rotated. A recurrent layer has a state in place of keys and values: the tokens that its convolution still sees, and what the
delta rule has written (`delta_rule.py`). Qwen3.5 is the same with other names of the stored weights.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import Attend, project
from jinfercept.models.config import DeltaNetConfig
from jinfercept.models.delta_rule import DeltaInputs, gated_delta_rule
from jinfercept.models.llama import LlamaLayer, normed
from jinfercept.pallas.layouts.rows import Rows, dense
from jinfercept.pallas.layouts.states import StateArray, StateRows, causal_convolution

_EPS = 1e-6
"""Added to the squares of a query or a key before it is normed."""


class DeltaNetLayer(LlamaLayer):
    """A convolution and a gated delta rule in place of attention, then the feed-forward network."""

    @property
    def _sizes(self) -> DeltaNetConfig:
        assert self.config.delta_net is not None
        return self.config.delta_net

    def _attention_weights(self) -> list[str]:
        return [f"delta_{name}" for name in ("qkvz", "ba", "taps", "decay", "step_bias", "norm", "o")]

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        # in place of attention, `attend` is the `StateRows` and `kv` the states, as `state_arrays` says
        rows, (tokens, states) = cast(StateRows, attend), cast(Any, kv)
        inputs = dense(y)
        mixed, gates = jnp.split(project("te,ekc->tkc", inputs, self.delta_qkvz), [self._sizes.channels], axis=-1)
        mixed, tokens = causal_convolution(mixed, self.delta_taps[...].astype(jnp.float32), tokens, rows)
        values, states = gated_delta_rule(self._delta_inputs(jax.nn.silu(mixed), inputs), states, rows)
        gates = gates.reshape(values.shape).astype(jnp.float32)
        wide = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + self.config.norm_eps)
        normed = self.delta_norm[...][None, None, None] * wide.astype(inputs.dtype)
        output = (normed * jax.nn.silu(gates)).astype(inputs.dtype)
        return output.reshape(*output.shape[:2], -1), cast(KV, (tokens, states))

    def _delta_inputs(self, mixed: Float[Array, "T K C"], inputs: Float[Array, "T E"]) -> DeltaInputs:
        sizes, wide = self._sizes, mixed.astype(jnp.float32)
        q, k, v = jnp.split(wide, [sizes.key_dim, 2 * sizes.key_dim], axis=-1)
        q, k = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS) for x in (q, k))
        beta, steps = jnp.split(project("te,ekg->tkg", inputs, self.delta_ba).astype(jnp.float32), 2, axis=-1)
        steps = jax.nn.softplus(steps + self.delta_step_bias[...].astype(jnp.float32)[None])
        decay = -jnp.exp(self.delta_decay[...].astype(jnp.float32))[None] * steps
        v = v.reshape(*v.shape[:2], sizes.group, sizes.value_dim)
        return DeltaInputs(q * sizes.key_dim**-0.5, k, v, decay, jax.nn.sigmoid(beta))

    def _summed(self, attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        return project("tkc,kce->te", attended, self.delta_o)


class DraftLayer(LlamaLayer):
    """A layer behind the last one that predicts the token after the next (multi-token prediction): it reads the last layer's
    output for a token, and the vector of the token that comes next. Embedding and head are the model's."""

    def _attention_weights(self) -> list[str]:
        return [
            *super()._attention_weights(),
            *(f"draft_{name}" for name in ("embedding_norm", "hidden_norm", "fc", "norm")),
        ]

    def inputs(self, following: Float[Array, "T E"], hidden: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """What the layer reads: `following` are the vectors of the next tokens, `hidden` is the last layer's output behind the
        final norm, or this layer's behind its own."""
        sides = (
            normed(following, self.draft_embedding_norm, self.config),
            normed(hidden, self.draft_hidden_norm, self.config),
        )
        return project("tse,sef->tf", jnp.stack(sides, axis=1), self.draft_fc)


def state_arrays(sizes: DeltaNetConfig) -> tuple[StateArray, ...]:
    """The state of a recurrent layer: the tokens before the next one that its convolution sees, and the delta rule's."""
    return (
        StateArray((sizes.num_taps - 1, sizes.num_key_heads, sizes.channels), None, 1),
        StateArray((sizes.num_key_heads, sizes.group, sizes.key_dim, sizes.value_dim), "float32", 0),
    )
