"""Contexts with states of recurrent layers: kept whole or not at all, and shared with no other."""

import random

import pytest

from jinfercept.kv.context import Context
from jinfercept.kv.manager import KVManager
from jinfercept.kv.page import Residency
from jinfercept.kv.states import StateSizes

SIZE = 4


def run(manager: KVManager, context: Context, tokens: list[int]) -> None:
    """Compute a context up to so many tokens, which leaves it held."""
    manager.begin_plan()
    manager.hold(context)
    manager.states.give(context)
    start, end = context.ready, len(tokens)
    assert manager.place(context, start, end) == end
    manager.computed(context, start, end)
    manager.commit(context, tokens)


def test_a_paused_context_keeps_its_state_and_goes_on_behind_it() -> None:
    manager = KVManager(8, 0, SIZE, states=StateSizes(2, 0, 10))
    context = manager.open()
    run(manager, context, list(range(9)))
    assert context.state
    assert (context.own_tokens, context.state_tokens) == (9, 10)
    manager.release(context)
    assert context.state_position == 9
    manager.hold(context)
    assert context.ready == 9


@pytest.mark.parametrize("page", [0, 2])
def test_a_context_that_loses_a_page_loses_all_and_its_state(page: int) -> None:
    manager = KVManager(8, 0, SIZE, states=StateSizes(2))
    context = manager.open()
    run(manager, context, list(range(9)))
    manager.release(context)
    assert manager.copies.drop(context, range(page, page + 1), device=True, host=False) == 3
    assert context.state == 0
    assert context.is_lost
    assert manager.states.num_free == 2
    manager.check([context])
    run(manager, context, list(range(9)))
    assert context.ready == 9


def test_contexts_of_the_same_tokens_share_nothing() -> None:
    manager = KVManager(8, 0, SIZE, states=StateSizes(2))
    tokens, contexts = list(range(8)), [manager.open(), manager.open()]
    for context in contexts:
        manager.refresh(context, tokens)
        run(manager, context, tokens)
    assert manager.occupancy().used == 4
    for context in contexts:
        manager.close(context)
    assert manager.occupancy().free == 8
    assert manager.states.num_free == 2


def test_a_follow_up_that_has_other_tokens_begins_anew() -> None:
    manager = KVManager(8, 0, SIZE, states=StateSizes(2))
    contexts = [manager.open(), manager.open()]
    for context, num_tokens in zip(contexts, (9, 8), strict=True):
        run(manager, context, list(range(9)))
        manager.release(context)
        manager.cut(context, num_tokens)
    assert [bool(context.state) for context in contexts] == [True, False]
    manager.check(contexts)


@pytest.mark.parametrize("seed", range(3))
def test_states_and_pages_agree_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    manager, tokens, contexts = KVManager(12, 0, SIZE, states=StateSizes(3)), list(range(64)), list[Context]()
    for _ in range(300):
        match rng.choice(["open", "run", "run", "drop", "evict", "cut", "close"]):
            case "open" if len(contexts) < 5:
                contexts.append(manager.open())
            case "run" if contexts:
                context = rng.choice(contexts)
                end = rng.randint(1, 24)
                if context.state_position >= end:
                    manager.copies.lose(context)
                while manager.states.lacks(context) or manager.num_available < 6:
                    manager.copies.evict_paused(1)
                run(manager, context, tokens[:end])
                manager.release(context)
            case "drop" if contexts:
                context = rng.choice(contexts)
                pages = range(rng.randint(0, context.num_pages), context.num_pages)
                manager.copies.drop(context, pages, device=True, host=rng.random() < 0.5)
            case "evict":
                manager.copies.evict_paused(rng.randint(1, 4))
            case "cut" if contexts:
                manager.cut(rng.choice(contexts), rng.randint(0, 24))
            case "close" if contexts:
                manager.close(contexts.pop(rng.randrange(len(contexts))))
            case _:
                continue
        manager.check(contexts)
        for context in contexts:
            resident = [page for run in context.runs() for page in run.pages if run.residency is not Residency.MISSING]
            assert resident == list(range(-(-context.state_position // SIZE)))
