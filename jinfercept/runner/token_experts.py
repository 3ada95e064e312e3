"""`RowExperts`: the experts of the query tokens of a step, or of some consecutive ones, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Int16


@dataclass(frozen=True)
class RowExperts:
    """See `sched.plan.TokenExperts`.

    Attributes:
        rows: by token and layer the numbers of its experts.
    """

    rows: Int16[np.ndarray, "T L C"]

    def of(self, place: int, count: int) -> Self:
        """Those of some tokens, without the memory of the others."""
        return type(self)(self.rows[place : place + count].copy())

    def placed(self, pieces: Sequence[tuple[int, Self]], num_tokens: int) -> Int16[np.ndarray, "T L C"]:
        """See `sched.plan.TokenExperts`."""
        whole = np.full((num_tokens, *self.rows.shape[1:]), -1, np.int16)
        for start, experts in pieces:
            whole[start : start + len(experts.rows)] = experts.rows[: max(0, num_tokens - start)]
        return whole
