"""`python -m examples.tool_adapter train DIRECTORY`: an adapter with which a small model calls tools, learnt on two processors.

The dialogues are made up (`dialogues.py`), and written as the server writes them for a model whose template knows no tools.
A run that was stopped goes on from the directory's `state.npz`.
"""

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from tyro import conf

from examples.async_calls.batches import Batch, batches
from examples.async_calls.dialogues import Tokens
from examples.tool_adapter.adapter import Adapter, adapted, first_adapter, save
from examples.tool_adapter.dialogues import Dialogue, dialogues
from jinfercept.chat.template import ChatTemplate
from jinfercept.cli.options import Maybe
from jinfercept.errors import ModelError
from jinfercept.layouts.scoring import PLAIN, Scoring
from jinfercept.models.converted import write
from jinfercept.models.embedded import NAME
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import Model
from jinfercept.models.protocol import Params
from jinfercept.tokenizer.load import load_tokenizer
from jinfercept.tokenizer.tokenizer import Tokenizer

_SAVED_EVERY_S = 120.0


class Learner(NamedTuple):
    """An adapter and the state of its optimiser."""

    adapter: Adapter
    state: optax.OptState


@dataclass(frozen=True)
class Train:
    """The command."""

    directory: conf.Positional[Path]
    """to write the adapter to, as PEFT does"""
    merged: Maybe[Path] = None
    """to write the model with the adapter to, which `serve` and `LLM` take"""
    model: str = NAME
    """that gets the adapter"""
    rank: int = 8
    """of the adapter"""
    alpha: float = 16.0
    """over the rank: what the adapter is multiplied with"""
    steps: int = 1500
    """batches to learn from"""
    rows: int = 2
    """of a batch"""
    width: int = 1024
    """tokens of a row; longer dialogues are left out"""
    learning_rate: float = 1e-3
    """its peak"""
    seed: int = 0
    """of the adapter and of the dialogues"""

    def run(self) -> int:
        """Learn, show the loss, and write the adapter; returns 0."""
        loaded = load(self.model, dtype="float32", quantization="none")
        tokenizer = load_tokenizer(loaded.source)
        if tokenizer is None:
            raise ModelError("the model has no tokenizer", got=self.model, fix="name another model")
        model, params = Model(loaded.model.config, joined=False), separate(loaded.params)
        scale, began_s, saved_s = self.alpha / self.rank, time.monotonic(), time.monotonic()
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(self._schedule(), weight_decay=0.0))
        first = first_adapter(params, self.rank, self.seed)
        learner, done = self._begun(Learner(first, rule.init(first)))
        step = stepper(model, rule, scale, self.rows * self.width // 3)
        ends = loaded.model.config.eos_token_ids
        lessons = batches((tokens(tokenizer, ends, d) for d in dialogues(self.seed)), self.rows, self.width)
        for number, lesson in enumerate(islice(lessons, done, self.steps), done + 1):
            learner, loss = step(learner, params, lesson)
            if number % 10 == 0 or number == self.steps:
                print(
                    f"{number:6} of {self.steps} steps  loss {float(loss):.4f}  {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
            if time.monotonic() - saved_s > _SAVED_EVERY_S or number == self.steps:
                self._save(learner, number, scale)
                saved_s = time.monotonic()
        if self.merged is not None:
            write(self.merged, model, adapted(params, learner.adapter, scale))
            tokenizer.save(self.merged)
        return 0

    def _schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, min(30, self.steps), max(31, self.steps))

    def _begun(self, learner: Learner) -> tuple[Learner, int]:
        """What a run before this one has learnt, and in how many steps."""
        file = self.directory / "state.npz"
        if not file.exists():
            return learner, 0
        with np.load(file) as stored:
            leaves, tree = jax.tree.flatten(learner)
            loaded = [jnp.asarray(stored[f"leaf_{index}"]) for index in range(len(leaves))]
            return jax.tree.unflatten(tree, loaded), int(stored["steps"])

    def _save(self, learner: Learner, steps: int, scale: float) -> None:
        save(self.directory, learner.adapter, scale, self.model)
        leaves: dict[str, Any] = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(learner))}
        np.savez(self.directory / "state.npz.new.npz", **leaves, steps=steps)
        (self.directory / "state.npz.new.npz").replace(self.directory / "state.npz")


def tokens(tokenizer: Tokenizer, end_token_ids: tuple[int, ...], dialogue: Dialogue) -> Tokens:
    """A dialogue's tokens as the server writes them, and which of them the agent wrote."""
    template = ChatTemplate(tokenizer, (), None, {}, end_token_ids, written_tools=dialogue.tools)
    ids, written = list[int](), list[bool]()
    text = ""
    for place, message in enumerate(dialogue.messages, 1):
        if message["role"] != "assistant":
            continue
        before = template.render(dialogue.messages[: place - 1])
        after = template.render(dialogue.messages[:place], add_generation_prompt=False)
        for piece, is_written in ((before[len(text) :], False), (after[len(before) :].rstrip("\n"), True)):
            piece_ids = template.encode(piece)
            ids += piece_ids
            written += [is_written] * len(piece_ids)
        text = before + after[len(before) :].rstrip("\n")
    return Tokens(ids, written)


def stepper(model: Model, rule: optax.GradientTransformation, scale: float, most_learnt: int) -> Any:
    """One step: the learner after it, and the loss before it.

    Args:
        scale: of the adapter.
        most_learnt: tokens of a batch that may be learnt; only their logits are computed.
    """

    def step(learner: Learner, params: Params, batch: Batch) -> tuple[Learner, Float[Array, ""]]:
        def loss(adapter: Adapter) -> Float[Array, ""]:
            return _loss(model, adapted(params, adapter, scale), batch, most_learnt)

        value, gradient = jax.value_and_grad(loss)(learner.adapter)
        updates, state = rule.update(gradient, learner.state, learner.adapter)
        return Learner(optax.apply_updates(learner.adapter, updates), state), value  # pyright: ignore[reportArgumentType]

    return jax.jit(step, donate_argnums=0)


def _loss(model: Model, params: Params, batch: Batch, most_learnt: int) -> Float[Array, ""]:
    """Mean negative log-likelihood of the tokens that the agent wrote, in nats."""
    rows, width = batch.ids.shape
    ids, segments = jnp.asarray(batch.ids), jnp.asarray(batch.segments)
    same = segments[:, None, :] == segments[:, :, None]
    visible = (same & jnp.tril(jnp.ones((width, width), bool))[None])[:, None]

    def attend(q: Array, k: Array, v: Array, kv: None, /, scoring: Scoring = PLAIN) -> tuple[Array, None]:
        assert scoring.is_plain, "the model has plain layers"
        apart = [x.reshape(rows, width, *x.shape[1:]) for x in (q, k, v)]
        return jax.nn.dot_product_attention(*apart, mask=visible).reshape(q.shape), kv

    positions = jnp.asarray(batch.positions).reshape(-1)
    x = model.embed(params.embed, ids.reshape(-1), positions)
    for weights in params.layers:
        x, _ = model.layer(weights, x, positions, None, attend)
    learnt = jnp.asarray(batch.learnt).reshape(-1)
    (chosen,) = jnp.nonzero(learnt, size=most_learnt, fill_value=0)
    is_there = jnp.arange(most_learnt) < learnt.sum()
    logits = model.head(params.head, x[chosen])
    targets = jnp.roll(ids, -1, axis=1).reshape(-1)[chosen]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * is_there) / jnp.maximum(is_there.sum(), 1)
