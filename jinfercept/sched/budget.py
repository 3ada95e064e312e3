"""How much KV may cross the host link behind one iteration, and in which direction. Pure functions, in tokens.

They know no request: whose pages move is the policy's choice, and that somebody progresses at all is the scheduler's.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple


class Split(NamedTuple):
    """One iteration's use of link and slots, in tokens.

    Attributes:
        swap_out: from the device to the host.
        swap_in: from the host to the device.
        new: that get device slots for the first time.
    """

    swap_out: int
    swap_in: int
    new: int


def swap_budget(step_s: float, swap_s: Callable[[int], float], most: int) -> int:
    """N_i: the most tokens whose transfer hides behind an iteration, `T_swap(N_i) = T_fwd(B_i)` (InferCept §4.1).

    Args:
        step_s: T_fwd(B_i), seconds of the iteration.
        swap_s: T_swap, seconds to move the KV of so many tokens one way; must not fall as tokens grow.
        most: an upper limit, such as the tokens that the pools hold.
    """
    return max(0, bisect_right(range(most + 1), step_s, key=swap_s) - 1)


def split_budget(
    budget: int, *, wanted_out: int, wanted_in: int, wanted_new: int, free_host: int, free_device: int
) -> Split:
    """Share out a budget under InferCept's three constraints (§4.1), new tokens' slots first, swap-in before swap-out.

    `out + in <= N`, `out <= free_host + in`, `in + new <= out + free_device`. Swap-in takes only slots that are free
    already, since those of this iteration's swap-out are free from the next one on; what new tokens still lack, swap-out
    must clear for them.

    Args:
        budget: N, tokens that the link may move in both directions together.
        wanted_out, wanted_in, wanted_new: tokens that would like to move, or to be computed.
        free_host, free_device: tokens for which there are slots.
    """
    swap_in = max(0, min(wanted_in, budget, free_device - wanted_new))
    swap_out = min(wanted_out, budget - swap_in, free_host + swap_in)
    return Split(swap_out, swap_in, min(wanted_new, free_device + swap_out - swap_in))
