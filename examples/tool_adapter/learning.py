"""One step of learning an adapter, over a batch whose rows are computed some at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from examples.tool_adapter.adapter import Adapter
from examples.tool_adapter.network import Batch, Frozen, loss
from jinfercept.models.config import ModelConfig


class Learner(NamedTuple):
    """An adapter and the state of its optimiser."""

    adapter: Adapter
    state: optax.OptState


RULE = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
"""Adam with a bound of the gradient; its updates are yet to be multiplied with the learning rate."""


def learning_rates(peak: float, steps: int) -> Float[np.ndarray, "steps"]:
    """They rise over a thirtieth of the steps, and fall along a cosine."""
    warm = min(max(8, steps // 30), steps)
    rates = optax.warmup_cosine_decay_schedule(peak / warm, peak, warm, max(steps, warm + 1), peak / 50)
    return np.array([rates(step) for step in range(steps)], np.float32)


def most_learnt(rows: Batch, at_once: int) -> int:
    """A bound of the learnt tokens of `at_once` rows, whichever they are."""
    counts = np.sort(rows.learnt.sum(axis=1))[::-1]
    return int(-(-int(counts[:at_once].sum()) // 128) * 128)


def stepper(config: ModelConfig, scale: float, at_once: int, most: int) -> Any:
    """One step at a learning rate: the learner after it, and the loss before it, in nats per learnt token.

    Args:
        scale: of the adapter.
        at_once: rows that are computed together.
        most: tokens of so many rows that may be learnt; only their logits are computed.
    """

    def step(learner: Learner, weights: Frozen, batch: Batch, rate: Array) -> tuple[Learner, Float[Array, ""]]:
        parts = jax.tree.map(lambda array: array.reshape(-1, at_once, array.shape[1]), batch)
        num_learnt = jnp.maximum(batch.learnt.sum(), 1)

        def part(total: tuple[Array, Adapter], rows: Batch) -> tuple[tuple[Array, Adapter], None]:
            value, gradient = jax.value_and_grad(
                lambda adapter: loss(config, weights, adapter, scale, rows, most) / num_learnt
            )(learner.adapter)
            return jax.tree.map(jnp.add, total, (value, gradient)), None

        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, learner.adapter)
        (value, gradient), _ = jax.lax.scan(part, nothing, parts)
        updates, state = RULE.update(gradient, learner.state, learner.adapter)
        adapter = jax.tree.map(lambda leaf, update: leaf - rate * update, learner.adapter, updates)
        return Learner(adapter, state), value

    return jax.jit(step, donate_argnums=0)
