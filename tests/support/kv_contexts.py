"""Contexts of a small manager, whose tokens count as computed without a runner."""

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import PageCopy, Residency
from jinfercept.kv.side_pool import SidePool

SIZE = 4
DIRTY, CLEAN, HOST, MISSING = Residency.DIRTY, Residency.CLEAN, Residency.HOST, Residency.MISSING


def make(pages: int = 10, host_pages: int = 10, *, prefix_caching: bool = True) -> KVManager:
    manager = KVManager(pages, host_pages, SIZE, prefix_caching=prefix_caching)
    manager.begin_plan()
    return manager


def run(manager: KVManager, tokens: list[int], salt: str = "", context: Context | None = None) -> Context:
    """A running context whose tokens are all computed and accepted."""
    context = context or manager.open(salt)
    manager.refresh(context, tokens)
    manager.hold(context)
    compute(manager, context, tokens)
    return context


def compute(manager: KVManager, context: Context, tokens: list[int]) -> None:
    start = context.ready
    assert manager.place(context, start, len(tokens)) == len(tokens)
    if start < len(tokens):
        manager.computed(context, start, len(tokens))
    manager.commit(context, tokens)


def finish(manager: KVManager, tokens: list[int], salt: str = "") -> None:
    """A request that came and went: its full pages are finished prefixes."""
    manager.close(run(manager, tokens, salt))


def evict_prefixes(manager: KVManager, num_pages: int) -> int:
    """Take device pages of finished prefixes; returns how many there were."""
    store = manager._store  # pyright: ignore[reportPrivateUsage]
    return store.evict(store.cached, num_pages)


def adopted(manager: KVManager, tokens: list[int], salt: str = "") -> int:
    """Pages that a new context of these tokens would adopt."""
    context = manager.open(salt)
    manager.refresh(context, tokens)
    number = context.num_pages
    manager.close(context)
    return number


def offload(manager: KVManager, context: Context, index: int) -> PageCopy | None:
    """The copy to make of a page; None if it cannot be copied."""
    copies, _ = manager.copy_out(context, range(index, index + 1), 1)
    return copies[0] if copies else None


def drop_device(manager: KVManager, context: Context, index: int) -> int:
    return manager.drop(context, range(index, index + 1), device=True, host=False)


def drop_host(manager: KVManager, context: Context, index: int) -> None:
    manager.drop(context, range(index, index + 1), device=False, host=True)


def swap_out(manager: KVManager, context: Context) -> None:
    copies, _ = manager.copy_out(context, range(context.num_pages), 99)
    assert len(copies) == context.num_pages
    assert manager.drop(context, context.tail_first, device=True, host=False) == context.num_pages
    manager.begin_plan()


def residencies(context: Context) -> list[Residency]:
    return [run.residency for run in context.runs() for _ in run.pages]


def host_slots(context: Context) -> list[int]:
    return [slot for extent in context.extents for slot in extent.host or ()]


def side_pool(manager: KVManager) -> SidePool:
    """The pool of a manager whose contexts have more than pages."""
    assert manager.side_pool is not None
    return manager.side_pool
