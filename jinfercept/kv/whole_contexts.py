"""What keeps contexts whole that have a window or a state: where they can go on, and from where others can."""

from typing import final

from jinfercept.kv.context import Context
from jinfercept.kv.copies import ContextCopies
from jinfercept.kv.side_pool import SidePool
from jinfercept.kv.store import ExtentStore
from jinfercept.kv.tails import ContextTails


@final
class WholeContexts:
    """Pauses, shortens and ends contexts so that their pages agree with their windows or states.

    Args:
        prefix_caching: contexts leave checkpoints for others.
    """

    def __init__(
        self, store: ExtentStore, tails: ContextTails, copies: ContextCopies, side_pool: SidePool, prefix_caching: bool
    ) -> None:
        self._store, self._tails, self._copies, self._side_pool = store, tails, copies, side_pool
        self._prefix_caching = prefix_caching

    def settle(self, context: Context) -> None:
        """Shorten a context that does not run to what it can go on from: all that it has, or what is before its last
        checkpoint. A context that has pages only stays as it is."""
        if context.side is None or self._can_go_on(context):
            return
        last, index = self._tails.last_checkpoint(context.extents)
        self._side_pool.free(context)
        self._tails.keep(context, index)
        if last is not None:
            self._side_pool.go_on(context, context.last, index)

    def pause(self, context: Context) -> None:
        """A context pauses: it keeps the window or state that its next token needs, or loses all pages that it alone has."""
        self._side_pool.pause(context)
        self._drop_last_copy(context)
        self._mark_end(context, likely=True)
        if not self._can_go_on(context):
            self._copies.lose(context)

    def end(self, context: Context) -> None:
        """A context ends: it leaves a checkpoint behind its last full page, and gives its window or state back."""
        self._mark_end(context, likely=True)
        self._side_pool.free(context)

    def mark(self, context: Context, remaining_tokens: int) -> None:
        """Make checkpoints behind the full pages of a running context, and where others part from it.

        Args:
            remaining_tokens: tokens of its sequence that are not computed yet.
        """
        side = context.side
        assert side is not None
        self._mark_end(context, likely=remaining_tokens < self._side_pool.last_tokens)
        if self._prefix_caching and 0 < side.branch * context.page_size <= context.ready:
            extent = self._tails.twin(context, side.branch)
            if extent is not None:
                self._side_pool.mark(context, extent, side.branch, likely=True)
            side.branch = 0

    def _can_go_on(self, context: Context) -> bool:
        return context.is_whole and self._side_pool.reaches(context, context.num_tokens)

    def _mark_end(self, context: Context, *, likely: bool) -> None:
        """Make a checkpoint behind the last page that other contexts can find."""
        index = self._side_pool.border(context)
        if self._prefix_caching and index and context.last.shareable:
            extent = context.last if index == context.last.end else self._tails.twin(context, index)
            if extent is not None:
                self._side_pool.mark(context, extent, index, likely=likely)

    def _drop_last_copy(self, context: Context) -> None:
        """The last page of a paused context counts as copied only with its window or state, which is copied with it."""
        last = context.extents[-1] if context.extents else None
        if last is None or last.host is None or last.device is None or last.num_contexts > 1:
            return
        if not self._side_pool.is_copied(context, context.num_tokens):
            self._store.drop_host(self._store.part(last, last.end - 1, last.end))
