"""The states of recurrent layers: one array for each part of a layer's state, one slot for each sequence that has one.

`StateRows` says which slots a step's rows read and write. Slot 0 is no sequence's. Padding tokens and unused rows change no
state. A row writes the slot of its sequence, and may read another one: the sequence then goes on from a state that stays as it
is, and that several rows may read. No row of a step writes a slot that another one reads or writes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


class StateArray(NamedTuple):
    """A part of the state that a recurrent layer has of one sequence."""

    shape: tuple[int, ...]  # without the axis of the slots
    dtype: DTypeLike | None = None  # None: that of the weights
    cut_axis: int | None = None  # of `shape`, which several devices cut; None: each has all of it


class StateRows(NamedTuple):
    """A step's rows, see `layouts.pages.Batch`, with the slots of states that they write and, as `sources`, read."""

    slots: Int[Array, "S"]
    sources: Int[Array, "S"]
    # The last tokens of every row that are drafts. The state that a row writes has not seen them, since they may be refused;
    # accepted ones come again in the next step.
    num_drafts: Int[Array, "S"]
    query_starts: Int[Array, "S1"]
    context_lens: Int[Array, "S"]
    num_decode: Int[Array, ""]

    @property
    def lengths(self) -> Int[Array, "S"]:
        return self.query_starts[1:] - self.query_starts[:-1]

    @property
    def seen(self) -> Int[Array, "S"]:
        """Query tokens of every row that the state behind it has seen."""
        return self.lengths - self.num_drafts

    @property
    def begin(self) -> Bool[Array, "S"]:
        return self.context_lens == self.lengths

    def read(self, state: Float[Array, "N *axes"]) -> Float[Array, "S *axes"]:
        """The states before the rows: zeros for a row that begins its sequence, whatever its slot holds."""
        rows = state.at[self.sources].get(mode="clip")
        return jnp.where(self.begin.reshape(-1, *(1,) * (state.ndim - 1)), jnp.zeros_like(rows), rows)

    def write(self, state: Float[Array, "N *axes"], rows: Float[Array, "S *axes"]) -> Float[Array, "N *axes"]:
        """Write the states of the rows that are in use."""
        slots = jnp.where(self.lengths > 0, self.slots, len(state))
        return state.at[slots].set(rows.astype(state.dtype), mode="drop")


def causal_convolution(
    x: Float[Array, "T *channels"],
    taps: Float[Array, "K *channels"],
    state: Float[Array, "N K1 *channels"],
    rows: StateRows,
) -> tuple[Float[Array, "T *channels"], Float[Array, "N K1 *channels"]]:
    """Every token's sum over the last K tokens of its sequence, itself included, times the taps; float32 inside.

    `state` has the K - 1 tokens before each row's, the earliest first. Returns the sums in x's dtype, and the state behind the
    rows.
    """
    num_before, num_rows, starts = state.shape[1], len(rows.slots), rows.query_starts[:-1]
    before = rows.read(state)
    row = jnp.clip(jnp.searchsorted(rows.query_starts[1:], jnp.arange(len(x)), side="right"), max=num_rows - 1)
    place = jnp.arange(len(x)) - starts[row]

    def tokens(row: Int[Array, "M"], place: Int[Array, "M"]) -> Float[Array, "M *channels"]:
        # places below 0 are tokens of the state
        own, earlier = x.at[starts[row] + place].get(mode="clip"), before.at[row, num_before + place].get(mode="clip")
        return jnp.where((place >= 0).reshape(-1, *(1,) * (x.ndim - 1)), own, earlier.astype(x.dtype))

    wide = [tokens(row, place - num_before + tap).astype(jnp.float32) * taps[tap][None] for tap in range(num_before)]
    summed = sum(wide, start=x.astype(jnp.float32) * taps[num_before][None])
    every_row = jnp.arange(num_rows)
    behind = [tokens(every_row, rows.seen - num_before + index) for index in range(num_before)]
    return summed.astype(x.dtype), rows.write(state, jnp.stack(behind, axis=1))
