"""`python -m examples.tool_adapter train DIRECTORY`: an adapter with which a small model calls tools, learnt on two processors.

Dialogues are written as the server writes them for a model whose template knows no tools.
A run that was stopped goes on from the directory's `state.npz`.
"""

import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tyro import conf

from examples.tool_adapter.adapter import adapted, first_adapter, save
from examples.tool_adapter.dialogues import LESSONS, lessons
from examples.tool_adapter.learning import RULE, Learner, learning_rates, most_learnt, stepper
from examples.tool_adapter.network import Batch, frozen
from examples.tool_adapter.packing import batches, document
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.cli.options import Maybe
from jinfercept.errors import ModelError
from jinfercept.models.converted import write
from jinfercept.models.embedded import NAME
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import Model

_SAVED_EVERY_S = 120.0


@dataclass(frozen=True)
class Train:
    """The command."""

    directory: conf.Positional[Path]
    """to write the adapter to, as PEFT does"""
    merged: Maybe[Path] = None
    """to write the model with the adapter to, which `serve` and `LLM` take"""
    lessons: Path = LESSONS
    """the dialogues to learn from, as JSON Lines; read again from the start when they are used up"""
    model: str = NAME
    """that gets the adapter"""
    rank: int = 8
    """of the adapter"""
    alpha: float = 16.0
    """over the rank: what the adapter is multiplied with"""
    steps: int = 512
    """batches to learn from"""
    stop_after: Maybe[int] = None
    """steps after which this run stops; another goes on"""
    rows: int = 4
    """of a batch"""
    at_once: int = 2
    """rows that are computed together: more take more memory"""
    width: int = 768
    """tokens of a row; dialogues that find no room are left out"""
    learning_rate: float = 2e-3
    """its peak"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of the model's products"""
    seed: int = 0
    """of the adapter's first weights"""

    def run(self) -> int:
        """Learn, show the loss, and write the adapter; returns 0."""
        loaded = load(self.model, dtype="float32", quantization="none")
        tokenizer = load_tokenizer(loaded.source)
        if tokenizer is None:
            raise ModelError("the model has no tokenizer", got=self.model, fix="name another model")
        config, params = loaded.model.config, separate(loaded.params)
        rows = self._rows(tokenizer, config.eos_token_ids)
        scale, began_s, saved_s = self.alpha / self.rank, time.monotonic(), time.monotonic()
        first = first_adapter(config, self.rank, self.seed)
        learner, done = self._begun(Learner(first, RULE.init(first)))
        rates = learning_rates(self.learning_rate, self.steps)
        step = stepper(config, scale, self.at_once, most_learnt(rows, self.at_once))
        weights = frozen(params, self.dtype)
        last = min(self.steps, self.stop_after or self.steps)
        for number in range(done + 1, last + 1):
            lesson = Batch(*(array[(number - 1) * self.rows : number * self.rows] for array in rows))
            learner, loss = step(learner, weights, lesson, rates[number - 1])
            if number % 10 == 0 or number == last:
                print(
                    f"{number:6} of {self.steps} steps  loss {float(loss):.4f}  {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
            if time.monotonic() - saved_s > _SAVED_EVERY_S or number == last:
                self._save(learner, number, scale)
                saved_s = time.monotonic()
        if self.merged is not None:
            merged = adapted(params, jax.tree.map(jnp.asarray, learner.adapter), scale)
            write(self.merged, Model(config, joined=False), merged)
            tokenizer.save(self.merged)
        return 0

    def _rows(self, tokenizer: Any, ends: tuple[int, ...]) -> Batch:
        """All that is learnt from."""
        documents = (document(tokenizer, ends, lesson) for lesson in cycle(lessons(self.lessons)))
        steps = islice(batches(documents, self.rows, self.width), self.steps)
        return Batch(*map(np.concatenate, zip(*steps, strict=True)))

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
