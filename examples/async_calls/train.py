"""`train`: a small Llama from nothing, or a checkpoint that learns on, on dialogues with asynchronous calls.

Before the dialogues a model from nothing has short lessons: interrupts with letters as ids, then the value of each, in any
order. Its first weights, with which it learns to copy in hundreds of steps, are as in "Mimetic Initialization of
Self-Attention Layers" (arXiv 2305.09828): attention starts out as what it mostly becomes. A head of the first layer looks at
the token at one distance. Later layers look for what equals the query, and write what they see.
"""

import random
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from tyro import conf

from examples.async_calls.dialogues import (
    MOST,
    Codec,
    Mode,
    Tokens,
    dialogues,
    interrupt,
    prompt,
    script,
    vocabulary,
    woven,
)
from examples.async_calls.learning import Batch, Learner, batch, batches, optimiser, pack, scores, start, stepper
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.cli.options import Maybe
from jinfercept.errors import ConfigError, ModelError
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.models.converted import is_converted, write
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load, random_params
from jinfercept.models.model import Model, tied, untied
from jinfercept.models.protocol import Params, Weights

MAX_VALUES = 10


def recalls(seed: int, codec: Codec) -> Iterator[Tokens]:
    """Lessons without an end; of each line only the value is learnt. The same ones for the same seed."""
    rng = random.Random(f"recall {seed}")
    while True:
        yield _recall(rng, codec)


def _recall(rng: random.Random, codec: Codec) -> Tokens:
    number = rng.randint(1, MAX_VALUES)
    values = {id_: rng.randint(1, MOST) for id_ in rng.sample(string.ascii_lowercase, number)}
    tokens = Tokens([], [])
    for id_, value in values.items():
        _append(tokens, codec.part(interrupt(id_, value)), written=False)
    for id_ in rng.sample(list(values), number):
        as_in_answer = rng.random() < 0.7  # else as in the call of a total
        line = codec.part(f"\n- {id_}: {values[id_]}" if as_in_answer else f"({id_}={values[id_]}")
        prompt_end = len(line) - len(codec.part(str(values[id_])))
        _append(tokens, line[:prompt_end], written=False)
        _append(tokens, line[prompt_end:], written=True)
    return tokens


def _append(tokens: Tokens, part: tuple[int, ...], *, written: bool) -> None:
    tokens.ids.extend(part)
    tokens.written.extend([written] * len(part))


SHARPNESS = 0.8
"""Of the first layer's heads: how much they prefer their distance."""
NUM_WAVES = 6
"""Fastest pairs of a head's dimensions, by which the first layer's heads find their distance."""
OUTPUT_SCALE = 0.15
"""Of what a layer adds at first, so that it does not drown the tokens themselves."""


def first_weights(config: ModelConfig, seed: int) -> Params:
    """Weights in float32, apart.

    Args:
        config: of a model with tied embeddings and as many heads for keys as for queries.
        seed: of the random part.
    """
    params = untied(config, separate(random_params(config, "float32", seed)))
    common = jax.random.normal(jax.random.key(seed), (config.hidden_size,))
    common /= jnp.linalg.norm(common)
    first, *later = params.layers
    layers = [_looking_back(first, common, config), *map(_matching, later)]
    quiet = tuple(layer | {name: layer[name] * OUTPUT_SCALE for name in ("o", "down")} for layer in layers)
    embed = params.embed | {"embedding": params.embed["embedding"] + common}
    return tied(config, params._replace(embed=embed, layers=quiet))


def _looking_back(layer: Weights, common: jax.Array, config: ModelConfig) -> Weights:
    """A layer whose head `h` looks at the token `h + 1` before. All tokens share the direction `common`."""
    half, heads = config.head_dim // 2, config.num_heads
    speeds = config.rope.theta ** (-jnp.arange(half) / half)
    angles = speeds * jnp.arange(1, heads + 1)[:, None]  # [H, D / 2]
    strength = jnp.where(jnp.arange(half) < NUM_WAVES, SHARPNESS, 0.0)
    query = jnp.concatenate([jnp.broadcast_to(strength, angles.shape), jnp.zeros_like(angles)], axis=1)
    key = jnp.concatenate([strength * jnp.cos(angles), strength * jnp.sin(angles)], axis=1)
    written = {"v": jnp.repeat(layer["v"][:, :1], heads, axis=1), "o": jnp.repeat(layer["o"][:1], heads, axis=0)}
    return (
        dict(layer)
        | written
        | {"q": layer["q"] + common[:, None, None] * query, "k": layer["k"] + common[:, None, None] * key}
    )


def _matching(layer: Weights) -> Weights:
    """A layer whose keys are like its queries, and whose heads write back what they read."""
    return dict(layer) | {"k": jnp.copy(layer["q"]), "o": jnp.moveaxis(layer["v"], 0, 2)}


NUM_EXAMINED = 64
_REPORTS = 12


class Start(NamedTuple):
    """What learns: weights in float32, apart."""

    model: Model
    params: Params
    codec: Codec


@dataclass(frozen=True)
class Train:
    """The command."""

    directory: conf.Positional[str]
    """to write the model to; give it wherever a model is asked for"""
    model: Maybe[str] = None
    """a checkpoint that learns on, of any format that is served (default: a small Llama from nothing)"""
    steps: int = 3500
    """batches to learn from"""
    rows: int = 8
    """of a batch"""
    width: int = 192
    """tokens of a row; longer dialogues are left out"""
    learning_rate: Maybe[float] = None
    """its peak (default: 0.006 from nothing, 0.0001 for a checkpoint)"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """of the weights that are written"""
    seed: int = 0
    """of the first weights and of the dialogues"""

    def run(self) -> int:
        """Learn, print the scores on held-out dialogues, and write the model with its vocabulary; returns 0.

        Raises:
            ConfigError: there is nothing to do.
            ModelError: the checkpoint cannot be loaded or has no vocabulary, or the directory holds a model already.
        """
        if min(self.steps, self.rows, self.width) < 1:
            raise ConfigError(
                "steps, rows and width are from 1", got=f"{self.steps}, {self.rows}, {self.width}", fix="…"
            )
        directory = Path(self.directory).expanduser()
        if is_converted(directory):
            raise ModelError("the directory holds a model already", got=directory, fix="name another directory")
        first = small_llama(self.seed) if self.model is None else checkpoint(self.model)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        params = self._learn(first)
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        stored = jax.tree.map(lambda leaf: leaf.astype(self.dtype), params)
        write(directory, first.model, stored)
        first.codec.tokenizer.save(directory)
        print(f"{directory}: learnt in {seconds:.0f} s ({cpu_s:.0f} s of processors)")
        return 0

    def _learn(self, first: Start) -> Params:
        """The weights after all steps."""
        peak = self.learning_rate or (0.006 if self.model is None else 1e-4)
        rule = optimiser(self.steps, peak)
        learner, step = start(first.model, first.params, rule), stepper(first.model, rule)
        held_out = Examination(first.model, woven(0, "validation", first.codec), self.width)
        for number, lesson in enumerate(self._lessons(first.codec), 1):
            learner, loss = step(learner, lesson)
            if number % -(-self.steps // _REPORTS) == 0 or number == self.steps:
                right, total = held_out.take(learner)
                shown = f"{right} of {total} validation dialogues without a mistake"
                print(f"{number:6} steps  loss {float(loss):.4f}  {shown}", flush=True)
        return tied(first.model.config, learner.params)

    def _lessons(self, codec: Codec) -> Iterator[Batch]:
        """Recalls for an eighth of the steps, then dialogues."""
        eighth = self.steps // 8
        lessons = (recalls(self.seed, codec), eighth), (woven(self.seed, "training", codec), self.steps - eighth)
        for some, steps in lessons:
            yield from islice(batches(some, self.rows, self.width), steps)


def small_llama(seed: int) -> Start:
    """A model of 0.83 million weights, with a vocabulary for the dialogues."""
    sample = list(islice(dialogues(0, "training"), 1000))
    texts = [prompt(dialogue.questions, mode) for dialogue in sample for mode in get_args(Mode)]
    texts += (piece.text for dialogue in sample for piece in script(dialogue, "async"))
    codec = Codec(vocabulary([*texts, *map(str, range(MOST + 1))]))
    config = ModelConfig(
        family="llama",
        vocab_size=codec.tokenizer.vocab_size,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        ffn_size=320,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0, rotary_dim=32),
        tie_embeddings=True,
        max_position=1024,
        eos_token_ids=(codec.end,),
        activation="silu",
    )
    return Start(Model(config, joined=False), first_weights(config, seed), codec)


def checkpoint(name: str) -> Start:
    """A checkpoint with its vocabulary. Raises `ModelError` if it cannot be loaded or has no vocabulary."""
    loaded = load(name, dtype="float32")
    tokenizer = load_tokenizer(loaded.source)
    if tokenizer is None:
        raise ModelError("the checkpoint has no tokenizer", got=name, fix="put its tokenizer.json beside the weights")
    return Start(Model(loaded.model.config, joined=False), separate(loaded.params), Codec(tokenizer))


class Examination:
    """Dialogues that a model predicts token by token. One is right if every token that the agent writes is the likeliest:
    greedy decoding would write the same.
    """

    def __init__(self, model: Model, dialogues: Iterator[Tokens], width: int) -> None:
        self._batch: Batch = batch(pack(list(islice(dialogues, NUM_EXAMINED)), width), width)
        self._score = jax.jit(lambda params, batch: scores(model, params, batch).wrong)

    def take(self, learner: Learner) -> tuple[int, int]:
        """How many dialogues are right, and of how many."""
        wrong, segments = np.asarray(self._score(learner.params, self._batch)), self._batch.segments
        owners = np.arange(len(segments))[:, None] * segments.max() + segments  # of the row and the dialogue in it
        there = np.unique(owners[segments > 0])
        return len(np.setdiff1d(there, owners[wrong])), len(there)
