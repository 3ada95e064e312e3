"""The documented behaviour of copies between the memories, case by case, and of copies in columns."""

from tests.support.kv_contexts import (
    CLEAN,
    make,
    offload,
    residencies,
    run,
    swap_out,
)


def test_spare_host_copies_go_before_copy_out_fails() -> None:
    manager = make(host_pages=2)
    done = run(manager, [1] * 8)
    manager.release(done)
    swap_out(manager, done)
    other = run(manager, [2] * 12)
    manager.release(other)
    assert manager.num_host_free == 0
    assert offload(manager, other, 0) is None, "a paused context counts on both copies"
    manager.close(done)
    assert manager.num_host_free == 2
    assert offload(manager, other, 0) is not None
    assert offload(manager, other, 1) is not None
    assert offload(manager, other, 2) is None
    manager.check([other])


def test_the_copy_of_a_page_in_use_is_spare() -> None:
    manager = make(host_pages=1)
    context = run(manager, [1] * 5)
    manager.release(context)
    offload(manager, context, 0)
    manager.begin_plan()
    assert manager.num_host_free == 0
    manager.hold(context)
    assert manager.num_host_free == 1
    assert residencies(context)[0] is CLEAN
