"""What keeps contexts of layers with windows whole: where they can go on, and from where others can."""

from typing import final

from jinfercept.kv.context import Context
from jinfercept.kv.copies import ContextCopies
from jinfercept.kv.store import ExtentStore
from jinfercept.kv.tails import ContextTails
from jinfercept.kv.windows import WindowPool


@final
class WholeContexts:
    """Pauses, shortens and ends contexts so that their pages and their windows agree. See `windows.py`.

    Args:
        prefix_caching: contexts leave checkpoints for others.
    """

    def __init__(
        self,
        store: ExtentStore,
        tails: ContextTails,
        copies: ContextCopies,
        windows: WindowPool,
        prefix_caching: bool,
    ) -> None:
        self._store, self._tails, self._copies, self._windows = store, tails, copies, windows
        self._prefix_caching = prefix_caching

    def settle(self, context: Context) -> None:
        """Shorten a context that does not run to what it can go on from: all that it has, or what is before its last
        checkpoint. A context without a window stays as it is."""
        if context.window is None or self._can_go_on(context):
            return
        last, index = self._tails.last_checkpoint(context.extents)
        self._windows.free(context)
        self._tails.keep(context, index)
        if last is not None:
            self._windows.go_on(context, context.last, index)

    def pause(self, context: Context) -> None:
        """A context with a window does not run any more: it keeps what its next token sees, or loses all that is its own."""
        self._windows.pause(context)
        self._drop_last_copy(context)
        self._mark_end(context, likely=True)
        if not self._can_go_on(context):
            self._copies.lose(context)

    def end(self, context: Context) -> None:
        """A context with a window is given up: others can go on from where it ended."""
        self._mark_end(context, likely=True)
        self._windows.free(context)

    def mark(self, context: Context) -> None:
        """Make checkpoints behind the full pages of a running context with a window, and where others part from it."""
        window = context.window
        assert window is not None
        self._mark_end(context, likely=False)
        if self._prefix_caching and 0 < window.branch * context.page_size <= context.ready:
            extent = self._tails.twin(context, window.branch)
            if extent is not None:
                self._windows.mark(context, extent, window.branch, likely=True)
            window.branch = 0

    def _can_go_on(self, context: Context) -> bool:
        return context.is_whole and self._windows.reaches(context, context.num_tokens)

    def _mark_end(self, context: Context, *, likely: bool) -> None:
        """Make a checkpoint behind the last page that other contexts can find."""
        if self._prefix_caching and context.last.parent is not None and context.last.shareable:
            self._windows.mark(context, context.last, context.last.end, likely=likely)

    def _drop_last_copy(self, context: Context) -> None:
        """The last page of a paused context counts as copied only with its window, which is copied with it."""
        last = context.extents[-1] if context.extents else None
        if last is None or last.host is None or last.device is None or last.num_contexts > 1:
            return
        if not self._windows.is_copied(context, context.num_tokens):
            self._store.drop_host(self._store.part(last, last.end - 1, last.end))
