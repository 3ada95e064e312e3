"""The loss of a served model on whole dialogues, packed into rows of one width, and the steps that lower it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float, Float32, Int
from optax.contrib import MuonDimensionNumbers

from examples.async_calls.dialogues import Tokens
from jinfercept.models.model import Model, tied, untied
from jinfercept.models.protocol import Params
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring

_PACKED_TOGETHER = 16
"""Rows' worth of dialogues from which rows are filled: more leave less padding."""


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        ids: of the tokens; 0 behind the last dialogue of a row.
        positions: of every token in its dialogue.
        segments: the number of its dialogue in the row, from 1; 0 for padding.
        learnt: whether the next token is one of the same dialogue that the agent wrote: interrupts and prompts are not learnt.
    """

    ids: Int[np.ndarray, "B R"]
    positions: Int[np.ndarray, "B R"]
    segments: Int[np.ndarray, "B R"]
    learnt: Bool[np.ndarray, "B R"]


def batches(dialogues: Iterator[Tokens], rows: int, width: int) -> Iterator[Batch]:
    """Batches of `rows` rows without an end, of dialogues without an end; those longer than `width` are left out."""
    waiting: list[list[Tokens]] = []
    while True:
        while len(waiting) < rows:
            waiting += pack(list(islice(dialogues, rows * _PACKED_TOGETHER)), width)
        yield batch(waiting[:rows], width)
        del waiting[:rows]


def pack(dialogues: Sequence[Tokens], width: int) -> list[list[Tokens]]:
    """Dialogues in rows of `width` tokens, first fit with the longest first; the rows in the order of their first dialogues."""
    rows: list[list[Tokens]] = []
    room: list[int] = []
    for dialogue in sorted(dialogues, key=lambda dialogue: -len(dialogue.ids)):
        length = len(dialogue.ids)
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if length > width:
            continue
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(dialogue)
        room[row] -= length
    order = {id(dialogue): place for place, dialogue in enumerate(dialogues)}
    return sorted(rows, key=lambda row: order[id(row[0])])


def batch(rows: Sequence[Sequence[Tokens]], width: int) -> Batch:
    """The arrays of rows."""
    shape = (len(rows), width)
    made = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool))
    for i, row in enumerate(rows):
        start = 0
        for segment, (ids, written) in enumerate(row, 1):
            stop = start + len(ids)
            made.ids[i, start:stop] = ids
            made.positions[i, start:stop] = range(len(ids))
            made.segments[i, start:stop] = segment
            made.learnt[i, start : stop - 1] = written[1:]
            start = stop
    return made


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
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        kv: None,
        /,
        scoring: Scoring = PLAIN,
    ) -> tuple[Float[Array, "T H D"], None]:
        assert scoring.is_plain, "the demo's model has plain layers"
        assert k is not None
        assert v is not None
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
