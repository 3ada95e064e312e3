"""A batch with the work schedules that a runner packs with it, for kernels that are called by themselves."""

import numpy as np

from jinfercept.pallas.layouts.pages import Batch
from jinfercept.pallas.work_schedule import Work, WorkCut, schedules


def prepare(batch: Batch, cut: WorkCut | None, *, decode_only: bool = False) -> Batch:
    """A batch whose numbers the host can read with its work, which an implementation with a `cut` needs.

    Args:
        batch: of one step; not traced.
        cut: of the implementation, see `cut_for`.
        decode_only: as for `paged_attention`.
    """
    if cut is None:
        return batch
    starts, contexts = np.asarray(batch.query_starts), np.asarray(batch.context_lens)
    num_tokens = batch.tokens.shape[0]
    decodes, *chunks = schedules(cut, starts, contexts, int(batch.num_decode), num_tokens, decode_only=decode_only)
    numbers = batch.query_starts, batch.context_lens, batch.page_tables, batch.num_decode
    return batch._replace(work=Work(*numbers, decodes, chunks[0] if chunks else None))
