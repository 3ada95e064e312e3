"""Contexts of layers with windows: a paused one keeps its last pages, goes on where it has them, and shares checkpoints."""

from jinfercept.kv.context import Context, ContextWindow
from jinfercept.kv.manager import KVManager
from jinfercept.kv.side_pool import SideSizes
from tests.support.kv_contexts import side_pool

SIZE, WINDOW = 4, 6
SIZES = SideSizes(16, 8, 0.5, window=WINDOW, slack=SIZE)


def run(manager: KVManager, context: Context, tokens: list[int], chunk: int = 99) -> int:
    """Compute a context up to these tokens, which leaves it held; returns how many were computed."""
    manager.begin_plan()
    manager.refresh(context, tokens)
    manager.hold(context)
    if side_pool(manager).is_fetchable(context):
        side_pool(manager).fetch(context)
        manager.fetch(context, context.num_pages)
        manager.begin_plan()
        manager.advance(context)
    first = start = context.ready
    while start < len(tokens):
        end = min(len(tokens), start + chunk)
        assert manager.place(context, start, end) == end
        manager.computed(context, start, end)
        manager.commit(context, tokens)
        assert manager.side_pool
        manager.side_pool.mark(context)
        manager.begin_plan()
        start = end
    return len(tokens) - first


def test_a_paused_context_keeps_what_the_next_token_sees() -> None:
    manager, tokens = KVManager(16, 0, SIZE, sides=SIZES, prefix_caching=False), list(range(30))
    context = manager.open()
    run(manager, context, tokens, chunk=8)
    manager.release(context)
    window = context.side
    assert isinstance(window, ContextWindow)
    assert (window.first, window.end) == ((30 - WINDOW + 1 - SIZE) // SIZE, 8)
    assert side_pool(manager).num_free == 16 - len(window.slots)
    assert context.state_tokens == round(len(window.slots) * 0.5)
    assert run(manager, context, [*tokens, 1, 2]) == 2


def test_a_follow_up_shares_up_to_the_end_of_the_first_request() -> None:
    manager, tokens = KVManager(32, 0, SIZE, sides=SIZES), list(range(26))
    first, second = manager.open(), manager.open()
    run(manager, first, tokens, chunk=8)
    manager.close(first)
    assert run(manager, second, [*tokens, 1, 2, 3]) == 29 - 24


def test_a_third_context_goes_on_where_the_second_left_the_first() -> None:
    """No checkpoint is where two prompts part, until the second one has computed up to there."""
    manager, prompt = KVManager(64, 0, SIZE, sides=SIZES._replace(num_slots=64)), list(range(22))
    contexts = [manager.open() for _ in range(3)]
    computed = [
        run(manager, context, [*prompt, *range(100 * number, 100 * number + 10)], chunk=16)
        for number, context in enumerate(contexts, 1)
    ]
    assert computed == [32, 32 - 16, 32 - 20]
    manager.check(contexts)


def test_checkpoints_in_the_middle_go_first_when_slots_are_needed() -> None:
    manager, tokens = KVManager(64, 0, SIZE, sides=SIZES._replace(num_slots=9)), list(range(40))
    first, second = manager.open(), manager.open()
    run(manager, first, tokens, chunk=8)
    manager.close(first)
    run(manager, second, [7] * 40, chunk=12)
    manager.check([second])
    manager.close(second)
    third, fourth = manager.open(), manager.open()
    assert run(manager, third, [*tokens, 1], chunk=12) == 1
    manager.close(third)
    assert run(manager, fourth, [*tokens[:18], 1], chunk=12) == 19


def test_a_chunk_for_which_the_pool_has_too_few_slots_lacks_one() -> None:
    """Two contexts run, and the second one's chunk has no slots from its third page on."""
    manager = KVManager(16, 0, SIZE, sides=SIZES._replace(num_slots=5))
    first, second = manager.open(), manager.open()
    run(manager, first, list(range(12)))
    manager.hold(second)
    placed = manager.place(second, 0, 16)
    assert placed == 8
    assert manager.free_slot(second, 4)
    assert not manager.free_slot(second, placed)
    manager.release(first)
    assert manager.evict_side(second, placed) > 0
    assert manager.place(second, placed, 16) == 16
