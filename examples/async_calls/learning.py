"""The loss of a served model on whole dialogues, and the steps that lower it."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float, Float32, Int
from optax.contrib import MuonDimensionNumbers

from examples.async_calls.batches import Batch
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.models.model import Model, tied, untied
from jinfercept.models.protocol import Params


class Learner(NamedTuple):
    """Weights, every array once, and the state of their optimiser."""

    params: Params
    state: optax.OptState


class Scores(NamedTuple):
    """Numbers of one batch.

    Attributes:
        loss: mean negative log-likelihood of the tokens that the agent wrote, in nats.
        wrong: learnt tokens that are not the model's likeliest, by row and segment.
    """

    loss: Float32[Array, ""]
    wrong: Bool[Array, "B R"]


def logits(model: Model, params: Params, batch: Batch) -> Float32[Array, "B R V"]:
    """Logits after every token; a token sees those before it in its dialogue."""
    rows, width = batch.ids.shape
    same = batch.segments[:, None, :] == batch.segments[:, :, None]
    visible = (same & jnp.tril(jnp.ones((width, width), bool)))[:, None]  # [B, 1, R, R]

    def attend(
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        kv: None,
        /,
        scoring: Scoring = PLAIN,
    ) -> tuple[Float[Array, "T H D"], None]:
        assert scoring.is_plain, "the demo's model has plain layers"
        apart = [x.reshape(rows, width, *x.shape[1:]) for x in (q, k, v)]
        return jax.nn.dot_product_attention(*apart, mask=visible).reshape(q.shape), kv

    positions = jnp.asarray(batch.positions).reshape(-1)
    x = model.embed(params.embed, jnp.asarray(batch.ids).reshape(-1), positions)
    for layer in params.layers:
        x, _ = model.layer(layer, x, positions, None, attend)
    return model.head(params.head, x).reshape(rows, width, -1)


def scores(model: Model, params: Params, batch: Batch) -> Scores:
    """The loss and the mistakes of weights, every array once, on a batch."""
    predicted = logits(model, tied(model.config, params), batch)
    targets: Int[Array, "B R"] = jnp.roll(jnp.asarray(batch.ids), -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(predicted, targets)
    learnt = jnp.asarray(batch.learnt)
    mean = jnp.sum(losses * learnt) / jnp.maximum(jnp.sum(learnt), 1)
    return Scores(mean, learnt & (predicted.argmax(axis=-1) != targets))


def optimiser(steps: int, peak: float) -> optax.GradientTransformation:
    """Muon (orthogonalised momentum) for the matrices of layers and Adam for all else, with a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, min(50, steps), max(steps, 51), peak / 100)
    matrices: Any = _matrices  # optax declares a tree or a function of one
    rule = optax.contrib.muon(
        schedule, adam_learning_rate=schedule, consistent_rms=0.2, muon_weight_dimension_numbers=matrices
    )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def _matrices(params: Params) -> Params:
    """For every weight that is a matrix of a layer, its axes that are summed over and those of the result; None for others."""
    inputs_first, heads_first = MuonDimensionNumbers((0,), (1, 2)), MuonDimensionNumbers((0, 1), (2,))
    axes = dict.fromkeys("qkv", inputs_first) | {"o": heads_first}
    axes |= dict.fromkeys(("gate", "up", "down"), MuonDimensionNumbers((0,), (1,)))
    layers = tuple({name: axes.get(name) for name in layer} for layer in params.layers)
    return Params(dict.fromkeys(params.embed), layers, dict.fromkeys(params.head))


def start(model: Model, params: Params, rule: optax.GradientTransformation) -> Learner:
    """A learner before its first step."""
    once = untied(model.config, params)
    return Learner(once, rule.init(once))


def stepper(model: Model, rule: optax.GradientTransformation) -> Callable[[Learner, Batch], tuple[Learner, Array]]:
    """One step: the learner after it, and the loss before it. Takes the learner's memory."""

    def step(learner: Learner, batch: Batch) -> tuple[Learner, Array]:
        loss, gradient = jax.value_and_grad(lambda params: scores(model, params, batch).loss)(learner.params)
        updates, state = rule.update(gradient, learner.state, learner.params)
        return Learner(cast(Params, optax.apply_updates(learner.params, updates)), state), loss

    return jax.jit(step, donate_argnums=0)
