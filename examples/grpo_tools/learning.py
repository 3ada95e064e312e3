"""Group-relative policy optimisation (GRPO, arXiv 2402.03300) of an adapter, over the padded arrays of rollouts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from examples.tool_adapter.learning import RULE, Learner
from examples.tool_adapter.network import Batch, Frozen, token_losses
from jinfercept.models.config import ModelConfig
from jinfercept.rollouts.samples import Rollouts

CLIP = 0.2
"""How far a ratio of probabilities may lead away from 1."""


class Experience(NamedTuple):
    """Samples with what they are worth.

    Attributes:
        rows: a sample each; learnt is what the model generated.
        logprobs: of the next token, when it was drawn; 0 where it is not learnt.
        advantages: of each sample over its group.
    """

    rows: Batch
    logprobs: Float32[np.ndarray, "B R"]
    advantages: Float32[np.ndarray, "B"]


class Report(NamedTuple):
    """Numbers of a step.

    Attributes:
        loss: before it.
        clipped: share of tokens whose ratio lay outside the bounds.
        drift: mean distance of log probabilities now from those of the draws, in nats.
    """

    loss: Float[Array, ""]
    clipped: Float[Array, ""]
    drift: Float[Array, ""]


def advantages(rewards: Float32[np.ndarray, "B"], groups: Any) -> Float32[np.ndarray, "B"]:
    """Rewards less the mean of the group, over its standard deviation.

    Args:
        groups: of each sample the number of its prompt.
    """
    values = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = groups == group
        values[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-4)
    return values


def experience(rollouts: Rollouts, rewards: Float32[np.ndarray, "B"], multiple: int = 16) -> Experience:
    """The arrays of a step. Their length is a multiple, so that few shapes are compiled."""
    arrays = rollouts.padded(multiple=multiple)
    ids, mask = arrays["token_ids"], arrays["loss_mask"]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    there = (positions < rollouts.lengths[:, None]).astype(np.int32)
    learnt, logprobs = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
    learnt[:, :-1], logprobs[:, :-1] = mask[:, 1:] > 0, arrays["processed_logprobs"][:, 1:]
    rows = Batch(ids, np.ascontiguousarray(positions), there, there, learnt)
    return Experience(rows, logprobs, advantages(rewards, rollouts.prompts))


def stepper(config: ModelConfig, scale: float, most: int) -> Any:
    """One step at a learning rate: the learner after it, and a `Report`. Takes the learner's memory.

    Args:
        scale: of the adapter.
        most: tokens of a batch that may be learnt.
    """

    def step(learner: Learner, weights: Frozen, batch: Experience, rate: Array) -> tuple[Learner, Report]:
        width = batch.rows.ids.shape[1]

        def objective(adapter: Any) -> tuple[Array, Report]:
            losses, places, is_there = token_losses(config, weights, adapter, scale, batch.rows, most)
            count = jnp.maximum(is_there.sum(), 1)
            change = jnp.where(is_there, -losses - jnp.asarray(batch.logprobs).reshape(-1)[places], 0.0)
            worth = jnp.asarray(batch.advantages)[places // width]
            ratio = jnp.exp(change)
            bounded = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
            value = -jnp.sum(jnp.minimum(ratio * worth, bounded * worth) * is_there) / count
            return value, Report(value, jnp.sum(ratio != bounded) / count, jnp.sum(jnp.abs(change)) / count)

        gradient, report = jax.grad(objective, has_aux=True)(learner.adapter)
        updates, state = RULE.update(gradient, learner.state, learner.adapter)
        adapter = jax.tree.map(lambda leaf, update: leaf - rate * update, learner.adapter, updates)
        return Learner(adapter, state), report

    return jax.jit(step, donate_argnums=0)
