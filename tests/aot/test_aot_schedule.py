"""What XLA would make of a step that carries its transfers in itself: the other way, of which the package makes no use.

The package dispatches copies by themselves (`tests/runner/test_dispatch_order.py`). In one program they hide too, each
beside its layer, but only by a scheduler that XLA does not use by default; without it every copy is waited for at once. To
offer that way would take executables for every number of pages that a step moves, beside every bucket, and host pages as
their arguments.
"""

from tests.aot.cuda import compile_for

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
NUM_LAYERS, PRODUCTS = 3, 2  # of a layer


def test_aot_copies_in_a_program_hide_behind_their_layer_only_by_the_latency_hiding_scheduler() -> None:
    compiled = compile_for("h100", one_program={"hiding": {HIDING: True}, "plain": {HIDING: False}})
    assert [facts["error"] for facts in compiled.values()] == [None, None]
    assert compiled["hiding"]["alias_bytes"] >= NUM_LAYERS * 500 * 16 * 2 * 4 * 128 * 2  # pages in place
    assert products_beside_copies(compiled["plain"]["schedule"]) == [set()] * NUM_LAYERS * 3
    beside = products_beside_copies(compiled["hiding"]["schedule"])
    for layer in range(NUM_LAYERS):
        mine = {layer * PRODUCTS, layer * PRODUCTS + 1}
        assert sum(mine <= products for products in beside) == 2, f"of layer {layer}, out and in: {beside}"


def products_beside_copies(schedule: list[tuple[str, str, str]]) -> list[set[int]]:
    """The numbers of the products between the start and the end of every copy."""
    begun: dict[str, int] = {}
    beside, products = [], 0
    for opcode, name, operand in schedule:
        if opcode == "copy-start":
            begun[name] = products
        elif opcode == "copy-done":
            beside.append(set(range(begun.pop(operand), products)))
        else:
            products += 1
    assert not begun
    assert products == NUM_LAYERS * PRODUCTS
    return beside
