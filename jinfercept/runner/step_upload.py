"""The one upload of a step: an int32 vector of every number that its executables read, sent before its copies begin.

It begins with the batch, whose length depends on the bucket, see `packing`. Behind that lies the common part, of one length in
all steps: the sampled rows, see `packing_samples`, and the device slots of the transfers. The embedding, a step's first
executable, returns the common part for those behind it.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Int, Int32

from jinfercept.runner.packing_samples import NUM_FIELDS

MOST_TRANSFERS = 32
"""Gathers and scatters of a step whose slots are in its common part. What moves more has further uploads."""


class CommonShape(NamedTuple):
    """The static sizes of the common part.

    Attributes:
        num_rows: most sampled rows.
        num_pages: most pages of a gather or a scatter.
    """

    num_rows: int
    num_pages: int

    @property
    def size(self) -> int:
        """Numbers of the common part."""
        return NUM_FIELDS * self.num_rows + MOST_TRANSFERS * self.num_pages

    def pack(
        self, samples: Int32[np.ndarray, "fields R"], transfers: Sequence[Int32[np.ndarray, "_"]]
    ) -> Int32[np.ndarray, "common"]:
        """The common part.

        Args:
            samples: the sampled rows, in as many columns as there are.
            transfers: device slots of at most `MOST_TRANSFERS` gathers and scatters.
        """
        vector = np.zeros(self.size, np.int32)
        vector[: NUM_FIELDS * self.num_rows].reshape(NUM_FIELDS, -1)[:, : samples.shape[1]] = samples
        if transfers:
            slots = self.transfers(vector)
            for row, numbers in enumerate(transfers):
                slots[row, : len(numbers)] = numbers
        return vector

    def samples(self, common: Int[Array, "common"], num_rows: int) -> Int[Array, "fields R"]:
        """The first sampled rows, as `pack_samples` has them."""
        return common[: NUM_FIELDS * self.num_rows].reshape(NUM_FIELDS, self.num_rows)[:, :num_rows]

    def slots(self, common: Int[Array, "common"], transfer: Int[Array, ""], num_pages: int) -> Int[Array, "k"]:
        """The device slots of one transfer."""
        return jax.lax.dynamic_index_in_dim(self.transfers(common), transfer, keepdims=False)[:num_pages]

    def transfers[A: Array | np.ndarray](self, common: A) -> A:
        """The part that has the device slots of all transfers, a row for each."""
        return cast(A, common[NUM_FIELDS * self.num_rows :].reshape(MOST_TRANSFERS, self.num_pages))
