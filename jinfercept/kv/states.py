"""The states of recurrent layers: who has one. A context of such a model is kept whole or not at all.

A state is of a context's first tokens, all that were computed, and of no fewer: it cannot be shortened, and another context
cannot share it. So a context has a state exactly as long as it has pages on the device, and all of these; what takes one of the
pages takes the rest and the state, and the context is computed again from its first token on. Each context has a tree of its
own, in which no other one finds pages.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple, final

from jinfercept.kv.context import Context
from jinfercept.kv.pool import SlotPool


class StateSizes(NamedTuple):
    """The pool of states.

    Attributes:
        num_states: device slots, numbered from 1 (0 is no context's); 0: the model has no recurrent layers.
        num_host_states: host slots.
        state_size: memory of a state, in tokens of KV.
    """

    num_states: int = 0
    num_host_states: int = 0
    state_size: int = 0


NO_STATES = StateSizes()


@final
class StatePool:
    """The state slots of one model.

    Args:
        sizes: of the pool.
    """

    def __init__(self, sizes: StateSizes) -> None:
        self._pool = SlotPool(sizes.num_states, first=1)
        self.state_size = sizes.state_size

    @property
    def is_used(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._pool.size > 0

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self._pool.num_free

    def lacks(self, context: Context) -> bool:
        """Whether a context that is to run needs a slot and none is free."""
        return self.is_used and not context.state and not self.num_free

    def give(self, context: Context) -> None:
        """Give a context that starts to run a state, unless it has one; a slot is free."""
        if self.is_used and not context.state:
            (context.state,) = self._pool.take(1)
            context.state_position = 0

    def free(self, context: Context) -> None:
        """Take a context's state from it."""
        if context.state:
            self._pool.give(array("i", (context.state,)))
            context.state, context.state_position = 0, 0

    def is_whole(self, context: Context) -> bool:
        """Whether all tokens that a context's state has seen are on the device, and no others."""
        return sum([extent.filled for extent in context.extents if extent.device is not None]) == context.state_position

    def check(self, contexts: Iterable[Context]) -> None:
        """Assert that every slot is free or some context's, and that contexts are whole; these are all open ones."""
        if not self.is_used:
            return
        self._pool.check([context.state for context in contexts if context.state])
        for context in contexts:
            if not context.held:
                assert bool(context.state) == (context.state_position > 0), "a state that has seen nothing"
                assert self.is_whole(context), "a state without its pages"
