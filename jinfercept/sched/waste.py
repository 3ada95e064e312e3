"""The waste of an interception under each way of treating its context: InferCept's equations (2) and (4), which its policy
compares (5), and our own (6), the return of pages from a disk.

Waste is device memory held without use, times the time it is held. The KV bytes of a token cancel inside one model, so
everything here is in token·seconds. Pure functions: no queue, no clock, no profile. The price of a step or a transfer arrives
as a function of tokens. Discarding at once (1) is (4) with one chunk. Swapping while the batch waits (3) is not used: the
engine swaps within the link's free budget, which wastes nothing.

One correction to the paper: equations (1) and (4) charge the other requests the whole of `T_fwd(x)`, though they would have
paid `T_fwd(0)` for their own decoding anyway; with an affine profile (4) would then grow with the number of chunks. Here, as
in the authors' code, others are charged only the growth `T_fwd(x) - T_fwd(0)`.
"""

from collections.abc import Callable


def preserve_waste(duration_s: float, context: int) -> float:
    """Equation (2), keep the context on the device: `T_int·C`, in token·seconds.

    Args:
        duration_s: T_int, expected seconds of the interception.
        context: C, tokens of the intercepted context.
    """
    return duration_s * context


def chunked_discard_waste(
    context: int, other_tokens: int, chunk: int, forward_s: Callable[[int], float], state: int = 0
) -> float:
    """Equation (4), discard and recompute in n chunks: `T_fwd(C)·C/2 + n·(T_fwd(C/n) - T_fwd(0))·C_other`, in token·seconds.

    Computed as it is executed: `C // chunk` full chunks and the rest, if there is one. So a chunk that divides C exactly pays
    for its last chunk like any other, and the waste never falls when the context grows. A state of recurrent layers is there
    from the first chunk on, and does not grow.

    Args:
        context: C, tokens of the intercepted context.
        other_tokens: C_other, context tokens of the other running requests; charged the growth only (the module says why).
        chunk: tokens recomputed in one iteration, at least 1; see `chunk_tokens`.
        forward_s: T_fwd, seconds of an iteration by its query tokens.
        state: memory of the context's state, in tokens.
    """
    full, rest = divmod(context, chunk)
    growth_s = full * _growth_s(chunk, forward_s) + _growth_s(rest, forward_s)
    return forward_s(context) * (context / 2 + state) + growth_s * other_tokens


def return_s(recompute_s: float, disk_s: float, swap_s: float) -> float:
    """Equation (6), seconds to return pages that are on disk and in no memory: `min(T_recompute, T_disk + T_swap)`.

    Args:
        recompute_s: T_recompute, seconds to compute them again.
        disk_s: T_disk, seconds to read them into the host's memory.
        swap_s: T_swap, seconds to move them from there to the device.
    """
    return min(recompute_s, disk_s + swap_s)


def chunk_tokens(saturation: int, running_query_tokens: int, floor: int) -> int:
    """Tokens that one iteration can recompute beside the running group: `S - query tokens of the group` (InferCept §4.2).

    Args:
        saturation: S, query tokens after which an iteration takes longer.
        running_query_tokens: those of the running group.
        floor: least chunk to assume, at least 1. A long prompt in flight fills the iteration for a moment only: without a
            floor it would make every recomputation look like one of single tokens.
    """
    return max(floor, saturation - running_query_tokens)


def _growth_s(query_tokens: int, forward_s: Callable[[int], float]) -> float:
    return forward_s(query_tokens) - forward_s(0)
