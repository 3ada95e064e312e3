"""Nemotron-H and Nemotron 3: Mamba-2 layers (arXiv 2405.21060), and a few with attention that turns nothing.

A checkpoint's layers have one part each: Mamba-2, attention, a feed-forward network or experts. Here a layer is a Mamba-2 or an
attention part with the feed-forward part that follows it, if one does (`hf_config.py`). The networks have no gates: their
activation is the square of ReLU. Experts are chosen as GLM 4.5's are, and may compute in a narrower space.

Mamba-2's groups are the key heads of `DeltaNetConfig`, and its heads the value heads: each group has its queries (C), its keys
(B), its heads' values (x) and their gates. No step is raised to `time_step_min`, as transformers does in prompts only.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jinfercept.models.blocks import Attend, project
from jinfercept.models.delta_rule import DeltaInputs, gated_delta_rule
from jinfercept.models.qwen3_next import DeltaNetLayer
from jinfercept.pallas.layouts.rows import Rows, dense, rms_normed
from jinfercept.pallas.layouts.states import StateRows, causal_convolution


class Mamba2Layer(DeltaNetLayer):
    """A convolution and Mamba-2's recurrence in place of attention, then the feed-forward part."""

    def _attention_weights(self) -> list[str]:
        return [
            *("mamba_in", "mamba_taps_bias", "mamba_skip", "mamba_norm"),
            *("delta_taps", "delta_decay", "delta_step_bias", "delta_o"),
        ]

    def _attended[KV](
        self, y: Rows, positions: Int[Array, "T"], kv: KV, attend: Attend[KV]
    ) -> tuple[Float[Array, "T H D"], KV]:
        # in place of attention, `attend` is the `StateRows` and `kv` the states, as `state_arrays` says
        sizes, rows, (tokens, states) = self._sizes, cast(StateRows, attend), cast(Any, kv)
        params = (self.delta_taps, self.mamba_taps_bias, self.delta_step_bias, self.delta_decay, self.mamba_skip)
        taps, taps_bias, step_bias, decay, skip = (param[...].astype(jnp.float32) for param in params)
        inputs, width = dense(y), sizes.group * sizes.value_dim
        projected = project("te,ekc->tkc", inputs, self.mamba_in)
        gates, mixed, steps = jnp.split(projected, [width, width + sizes.channels], axis=-1)
        mixed, tokens = causal_convolution(mixed, taps, tokens, rows)
        mixed = jax.nn.silu(mixed.astype(jnp.float32) + taps_bias[None])
        v, k, q = jnp.split(mixed, [width, width + sizes.key_dim], axis=-1)
        v = v.reshape(*v.shape[:2], sizes.group, sizes.value_dim)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + step_bias[None])
        written = DeltaInputs(q, k, v, -jnp.exp(decay)[None] * steps, steps)
        values, states = gated_delta_rule(written, states, rows, corrects=False)
        values = (values + v * skip[None, ..., None]).reshape(gates.shape) * jax.nn.silu(gates.astype(jnp.float32))
        values = rms_normed(values, jnp.ones(width), self.config.norm_eps).astype(inputs.dtype)
        return values * self.mamba_norm[...][None], cast(KV, (tokens, states))
