"""The gated delta rule (arXiv 2412.06464), a recurrence over the tokens of a sequence, for the rows of a step; and Mamba-2's
(arXiv 2405.21060), which is the same without what the state has.

A head has a state `S [key_dim, value_dim]`. A token multiplies it by a decay, reads at its key what the state has, writes the
difference to its own value there, times β, and reads at its query:

    S ← exp(g) S;  S ← S + k ⊗ β (v - k S);  o = q S

Rows of few tokens, as decode rows with drafts are, compute that token by token, many rows at a time. Rows of more than
`SHORT_TOKENS` compute blocks of `BLOCK_TOKENS`, each as a few matrix products with the inverse of a triangular matrix (the
chunked form of the paper), one block after the other. All is float32. Padding within a block has β = 0 and g = 0, which leaves
the state as it is.

Mamba-2 writes a token's own value, `S ← S + k ⊗ β v`, so its blocks have no triangular matrix. Its queries, keys and values are
the papers' C, B and x, and β its step.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jinfercept.pallas.layouts.states import StateRows

BLOCK_TOKENS = 64
"""Tokens of a row that are computed at a time. Drafts are within a row's first block."""
SHORT_TOKENS = 16
"""Most tokens of a row that are computed one by one: a block costs as much as about so many."""
SHORT_ROWS = 32
"""Rows of few tokens that are computed at a time: their states are copied."""

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
States = Float32[Array, "N K G D W"]
"""A layer's states: `K` key heads, `G` value heads of each, `D` key_dim, `W` value_dim."""


class DeltaInputs(NamedTuple):
    """What the tokens bring. Queries and keys are normed, and queries scaled."""

    q: Float32[Array, "T K D"]
    k: Float32[Array, "T K D"]
    v: Float32[Array, "T K G W"]
    decay: Float32[Array, "T K G"]  # g, at most 0
    beta: Float32[Array, "T K G"]

    def part(self, start: Int[Array, ""], size: int) -> "DeltaInputs":
        """Consecutive tokens."""
        return DeltaInputs(*(jax.lax.dynamic_slice_in_dim(x, start, size) for x in self))


def gated_delta_rule(
    inputs: DeltaInputs, states: States, rows: StateRows, *, corrects: bool = True
) -> tuple[Float32[Array, "T K G W"], States]:
    """What the tokens read, and the states behind the rows. Padding tokens read anything.

    Args:
        corrects: whether a token writes the difference to what the state has at its key; false: its value, as Mamba-2's do.
    """
    num_tokens, outputs = len(inputs.q), jnp.zeros_like(inputs.v)
    if num_tokens > SHORT_TOKENS:  # first, since a row's last block writes over what follows
        padded = [jnp.pad(x, ((0, BLOCK_TOKENS), *((0, 0),) * (x.ndim - 1))) for x in (*inputs, outputs)]
        outputs, states = _longer_rows(DeltaInputs(*padded[:-1]), padded[-1], states, rows, corrects)
        outputs = outputs[:num_tokens]
    if num_tokens > 1:
        outputs, states = _short_rows(inputs, outputs, states, rows, corrects, 2, SHORT_TOKENS)
    return _short_rows(inputs, outputs, states, rows, corrects, 1, 1)


def _short_rows(
    inputs: DeltaInputs,
    outputs: Float32[Array, "T K G W"],
    states: States,
    rows: StateRows,
    corrects: bool,
    fewest: int,
    most: int,
) -> tuple[Float32[Array, "T K G W"], States]:
    """The rows of `fewest` to `most` tokens."""
    size = min(SHORT_ROWS, len(rows.slots))
    missing = -len(rows.slots) % size
    is_short = (rows.lengths >= fewest) & (rows.lengths <= most)
    lengths = jnp.where(is_short, rows.lengths, 0)
    fields = rows.slots, rows.sources, rows.begin, rows.query_starts[:-1], lengths, rows.seen
    padded = [jnp.pad(of_rows, (0, missing)) for of_rows in fields]
    last = jnp.max(jnp.where(is_short, jnp.arange(1, len(rows.slots) + 1), 0))

    def compute(index: Int[Array, ""], carried: tuple[Array, Array]) -> tuple[Array, Array]:
        outputs, states = carried
        slots, sources, begin, starts, lengths, seen = (
            jax.lax.dynamic_slice_in_dim(of_rows, index * size, size) for of_rows in padded
        )
        before = jnp.where(begin[:, None, None, None, None], 0.0, states.at[sources].get(mode="clip"))

        def step(place: Int[Array, ""], carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            outputs, state, behind = carried
            token = DeltaInputs(*(x.at[starts + place].get(mode="clip") for x in inputs))
            output, state = _token(token, state, corrects)
            at = jnp.where(place < lengths, starts + place, len(outputs))
            behind = jnp.where((place < seen)[:, None, None, None, None], state, behind)
            return outputs.at[at].set(output, mode="drop"), state, behind

        num_steps = 1 if most == 1 else jnp.max(lengths)  # XLA makes no loop of one step
        outputs, _, behind = jax.lax.fori_loop(0, num_steps, step, (outputs, before, before))
        used = jnp.where(lengths > 0, slots, len(states))
        return outputs, states.at[used].set(behind, mode="drop")

    return jax.lax.fori_loop(0, -(-last // size), compute, (outputs, states))


def _token(
    token: DeltaInputs, before: Float32[Array, "S K G D W"], corrects: bool
) -> tuple[Float32[Array, "S K G W"], Float32[Array, "S K G D W"]]:
    """One token of every row."""
    state = before * jnp.exp(token.decay)[..., None, None]
    new = token.v - _einsum("skd,skgdw->skgw", token.k, state) if corrects else token.v
    state = state + _einsum("skd,skgw->skgdw", token.k, new * token.beta[..., None])
    return _einsum("skd,skgdw->skgw", token.q, state), state


def _longer_rows(
    inputs: DeltaInputs, outputs: Float32[Array, "P K G W"], states: States, rows: StateRows, corrects: bool
) -> tuple[Float32[Array, "P K G W"], States]:
    """The rows of more tokens, block by block. A row's last block reaches into the next row, whose own blocks come later."""
    num_blocks = jnp.where(rows.lengths > SHORT_TOKENS, -(-rows.lengths // BLOCK_TOKENS), 0)
    last_blocks = jnp.cumsum(num_blocks)

    def compute(block: Int[Array, ""], carried: tuple[Array, Array]) -> tuple[Array, Array]:
        outputs, states = carried
        row = jnp.searchsorted(last_blocks, block, side="right")
        place = (block - last_blocks[row] + num_blocks[row]) * BLOCK_TOKENS
        start, slot = rows.query_starts[row] + place, rows.slots[row]
        is_own = place + jnp.arange(BLOCK_TOKENS) < rows.lengths[row]
        part = inputs.part(start, BLOCK_TOKENS)
        part = part._replace(
            decay=jnp.where(is_own[:, None, None], part.decay, 0.0),
            beta=jnp.where(is_own[:, None, None], part.beta, 0.0),
        )
        source = jnp.where(place == 0, rows.sources[row], slot)
        before = jax.lax.dynamic_index_in_dim(states, source, keepdims=False)
        before = jnp.where(rows.begin[row] & (place == 0), 0.0, before)
        output, behind = _block(part, before, jnp.clip(rows.seen[row] - place, 0, BLOCK_TOKENS), corrects)
        states = jax.lax.dynamic_update_index_in_dim(states, behind, slot, 0)
        return jax.lax.dynamic_update_slice_in_dim(outputs, output, start, 0), states

    return jax.lax.fori_loop(0, last_blocks[-1], compute, (outputs, states))


def _block(
    block: DeltaInputs, before: Float32[Array, "K G D W"], num_seen: Int[Array, ""], corrects: bool
) -> tuple[Float32[Array, "C K G W"], Float32[Array, "K G D W"]]:
    """Consecutive tokens of one row. The state behind them has seen the first `num_seen`."""
    q, k = block.q, block.k
    decay = jnp.cumsum(block.decay, axis=0)  # [C, K, G], from the block's start
    by_head = jnp.moveaxis(decay, 0, -1)
    causal = jnp.tril(jnp.ones((len(q), len(q)), bool))[None, None]
    between = jnp.exp(jnp.where(causal, by_head[..., :, None] - by_head[..., None, :], -jnp.inf))  # [K, G, C, C]
    grown = jnp.exp(decay)[..., None]
    written = block.v * block.beta[..., None]
    if corrects:  # by what those before in the block write
        earlier = _einsum("ikd,jkd->kij", k, k)[:, None] * between * jnp.moveaxis(block.beta, 0, -1)[..., None]
        keys = grown * k[:, :, None] * block.beta[..., None]
        solved = jax.lax.linalg.triangular_solve(
            earlier,
            jnp.moveaxis(jnp.concatenate([written, keys], axis=-1), 0, 2),  # [K, G, C, W + D]
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        values, keys = jnp.split(solved, [written.shape[-1]], axis=-1)
        written = values - _einsum("kgcd,kgdw->kgcw", keys, before)
    else:
        written = jnp.moveaxis(written, 0, 2)
    seen = _einsum("ikd,jkd->kij", q, k)[:, None] * between
    output = _einsum("ckgd,kgdw->ckgw", grown * q[:, :, None], before) + _einsum("kgij,kgjw->ikgw", seen, written)
    is_seen = (jnp.arange(len(q)) < num_seen)[:, None, None]
    end = jnp.where(num_seen > 0, decay[num_seen - 1], 0.0)
    decay_to_end = jnp.exp(jnp.where(is_seen, end[None] - decay, -jnp.inf))
    behind = before * jnp.exp(end)[..., None, None]
    return output, behind + _einsum("ckd,ckg,kgcw->kgdw", k, decay_to_end, written)
