"""Contexts with states of recurrent layers: kept whole or not at all, moved with their states, shared up to checkpoints."""

from jinfercept.kv.context import Context, ContextState
from jinfercept.kv.manager import KVManager
from jinfercept.kv.side_pool import SideSizes
from tests.support.kv_contexts import side_pool

SIZE = 4
SIZES = SideSizes(3, 0, 10)


def run(manager: KVManager, context: Context, tokens: list[int], end: int | None = None) -> None:
    """Compute a context up to some of so many tokens, in one plan, which leaves it held."""
    manager.begin_plan()
    if not context.in_use:
        manager.refresh(context, tokens)
        manager.hold(context)
    start, end = context.ready, end or len(tokens)
    assert manager.free_slot(context, start)
    assert manager.place(context, start, end) == end
    manager.computed(context, start, end)
    manager.commit(context, tokens)
    if end - start > 1:
        side_pool(manager).mark(context)


def state(context: Context) -> ContextState:
    assert isinstance(context.side, ContextState)
    return context.side


def num_free(manager: KVManager) -> int:
    return side_pool(manager).num_free


def test_a_checkpoint_is_found_by_the_plan_after_the_one_that_writes_its_state() -> None:
    manager, tokens = KVManager(16, 0, SIZE, sides=SIZES), list(range(12))
    first, second, third = (manager.open() for _ in range(3))
    run(manager, first, tokens, end=8)
    manager.refresh(second, tokens)
    assert second.num_pages == 0
    manager.begin_plan()
    manager.refresh(third, tokens)
    assert (third.num_pages, state(third).position) == (2, 8)
    manager.check([first, second, third])


def test_no_more_states_leave_the_device_than_slots_are_wanted() -> None:
    manager = KVManager(16, 16, SIZE, sides=SIZES._replace(num_host_slots=3))
    contexts = [manager.open() for _ in range(3)]
    for number, context in enumerate(contexts):
        run(manager, context, [number] * 6)
        manager.release(context)
    manager.begin_plan()
    for context in contexts:
        assert side_pool(manager).copy_out(context, 6) is not None
    manager.begin_plan()
    assert side_pool(manager).find(1)
    assert num_free(manager) == 1
    assert [bool(state(context).slots) for context in contexts] == [False, True, True]
    manager.check(contexts)


def test_a_context_whose_last_token_its_state_has_seen_steps_back() -> None:
    manager, tokens = KVManager(8, 0, SIZE, sides=SIZES), list(range(10))
    context = manager.open()
    run(manager, context, tokens, end=8)
    run(manager, context, tokens)
    manager.release(context)
    manager.step_back(context, 11)
    assert state(context).position == 10
    manager.step_back(context, 10)
    assert state(context).position == 8
    manager.check([context])


def test_chunks_end_at_pages_where_there_can_be_checkpoints() -> None:
    """Where clients cut prompts: behind the system prompt, behind the last message, and before the last token."""
    end = 99
    manager, tokens = KVManager(99, 0, SIZE, sides=SIZES, turn_ends=(end,)), [*[0] * 9, end, *[1] * 19, end, *[2] * 8]
    context, start, ends = manager.open(), 0, list[int]()
    manager.refresh(context, tokens)
    while start < len(tokens):
        start = side_pool(manager).chunk_end(context, start, len(tokens), len(tokens))
        ends.append(start)
    assert ends == [8, 28, 36, 38]
    assert side_pool(manager).chunk_end(context, 8, 18, 38) == 16
    without = KVManager(99, 0, SIZE, sides=SIZES, prefix_caching=False)
    assert side_pool(without).chunk_end(without.open(), 0, 10, 40) == 10


def test_the_last_page_that_a_context_filled_token_by_token_has_a_checkpoint() -> None:
    manager, tokens = KVManager(16, 0, SIZE, sides=SIZES), list(range(16))
    context = manager.open()
    for end in range(6, 16):
        run(manager, context, tokens[:end])
        manager.check([context])
    assert num_free(manager) == 1, "the state, and one checkpoint"
    manager.close(context)
    manager.refresh(context, [*tokens[:15], 50])
    assert (context.num_pages, state(context).position) == (3, 12)
    manager.check([context])


def test_a_context_that_decodes_takes_no_slot_of_those_in_use() -> None:
    manager = KVManager(16, 0, SIZE, sides=SideSizes(2))
    contexts = [manager.open(), manager.open()]
    for end in range(6, 16):
        for number, context in enumerate(contexts):
            run(manager, context, [number] * end)
        manager.check(contexts)
    assert [bool(state(context).slot) for context in contexts] == [True, True]


def test_where_a_client_cuts_the_prompt_its_state_goes_to_the_host_too() -> None:
    manager = KVManager(8, 8, SIZE, sides=SIZES._replace(num_host_slots=2), turn_ends=(99,))
    context, tokens, pool = manager.open(), [*range(9), 99, 10, 11, 12], side_pool(manager)
    run(manager, context, tokens, end=8)
    run(manager, context, tokens)
    manager.release(context)
    manager.begin_plan()
    copies = pool.copy_out(context, 13)
    assert copies is not None
    assert len(copies) == 2, "of the context, and behind the page before the turn's end"
    manager.copy_out(context, range(4), 4)
    assert manager.drop(context, range(4), device=True, host=False) == 4
    assert pool.find(3)
    manager.begin_plan()
    assert num_free(manager) == 3, "nothing is left on the device"
    manager.cut(context, 11)
    assert (context.num_pages, state(context).position, len(state(context).slots)) == (2, 8, 0)
    manager.hold(context)
    assert manager.num_fetchable(context) == 3
    twin = manager.open()
    manager.refresh(twin, [*tokens[:10], 60])
    assert (twin.num_pages, state(twin).host_slots) == (2, state(context).host_slots)
    assert pool.fetch(context)
    assert pool.fetch(twin) is None, "a plan fetches a host slot once"
    manager.fetch(context, 2)
    manager.begin_plan()
    assert pool.fetch(twin)
    manager.advance(context)
    assert context.ready == 8
    manager.check([context, twin])
    manager.close(twin)
    run(manager, context, [*tokens[:11], 50, 51])
    manager.close(context)
    manager.check([])
    other = [manager.open() for _ in range(2)]
    for number, fresh in enumerate(other):
        run(manager, fresh, [60 + number] * 6)
        manager.release(fresh)
        manager.begin_plan()
        assert pool.copy_out(fresh, 6), "contexts take the host slots of checkpoints"
    manager.check(other)
