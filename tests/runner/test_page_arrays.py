"""Pages on their way: what is fetched is what was offloaded, in arrays of any size, and arrays stay at least half live."""

from collections.abc import Sequence
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.kv.page import PageCopy
from jinfercept.models import mesh
from jinfercept.pallas.layouts.interleaved import FP8
from jinfercept.runner import page_transfers
from jinfercept.runner.executables import Executables
from jinfercept.runner.packing import MOST_TRANSFERS, CommonShape
from jinfercept.runner.packing_samples import NUM_FIELDS
from jinfercept.runner.page_transfers import layer_pages, transfer_sizes
from jinfercept.runner.pools import Pool, _cover
from tests.support.tiny_model import Workload, count_ties, streams, tiny_llm

NUM_PAGES, NUM_HOST = 24, 40
CONTEXT_PAGES, MOVED_PAGES = 7, 12


class Move(NamedTuple):
    """One step's moves, by device or host slot, as far as they are possible then."""

    offload: list[int]
    drop: list[int]
    fetch: list[int]


@st.composite
def moves(draw: st.DrawFn) -> list[Move]:
    def some(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most - 1), max_size=NUM_PAGES, unique=True))

    return [Move(some(NUM_PAGES), some(NUM_HOST), some(NUM_HOST)) for _ in range(draw(st.integers(1, 5)))]


def pool(staging: int, num_layers: int) -> Pool:
    """Pages with host copies in arrays of at most so many."""
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    shapes = (layer_pages(NUM_PAGES + 1, 2, 1, 2, jnp.float32, home),) * num_layers
    sizes = transfer_sizes(jax.default_backend(), staging)
    common = CommonShape(1, sizes[0])
    kv = Pool(dict(enumerate(shapes)), common, sizes=sizes, staging_pages=staging, moved_pages=MOVED_PAGES)
    run = Executables()
    kv.add_executables(run)
    return kv


def copies(kv: Pool, slot: int) -> np.ndarray:
    """The layers of a page on the host."""
    array, index = kv.host[slot]
    return np.asarray(array.data)[index]


def step(kv: Pool, fetch: list[PageCopy], drop: list[int], offload: list[PageCopy]) -> None:
    transfers, blank = kv.begin(fetch, drop, offload), np.zeros((NUM_FIELDS, 0), np.int32)
    kv.commons = [jnp.asarray(kv._common_shape.pack(blank, group)) for group in batched(transfers, MOST_TRANSFERS)]
    kv.fetch()
    kv.offload()
    kv.scatter()
    kv.wait()


def check(kv: Pool, steps: list[Move]) -> None:
    """Execute the moves beside a model of both memories: one number by slot, to which a layer adds 100 times its place."""
    kv.reset()
    kv.layers = tuple(
        jnp.zeros_like(layer) + 100.0 * place + jnp.arange(NUM_PAGES + 1.0)[:, None, None, None, None]
        for place, layer in enumerate(kv.layers)
    )
    device, host = {slot: float(slot) for slot in range(1, NUM_PAGES + 1)}, dict[int, float]()
    contexts = dict[int, int]()  # of host slots
    for move in steps:
        fetch = [PageCopy(1 + index, slot) for index, slot in enumerate(slot for slot in move.fetch if slot in host)]
        fetch = fetch[:NUM_PAGES]
        drop = [slot for slot in move.drop if slot in host]
        landed = {copy.device_slot: host[copy.host_slot] for copy in fetch}
        for slot in drop:
            del host[slot]
        free = [slot for slot in range(NUM_HOST) if slot not in host]
        pages = enumerate(zip(move.offload, free, strict=False))
        offload = [PageCopy(1 + page, slot, index // CONTEXT_PAGES) for index, (page, slot) in pages]
        contexts |= {copy.host_slot: copy.context for copy in offload}
        host |= {copy.host_slot: device[copy.device_slot] for copy in offload}
        device |= landed
        step(kv, fetch, drop, offload)
        assert set(kv.host) == set(host)
        arrays = kv.host.arrays
        assert sum(array.size for array in arrays) < max(1, 2 * len(host))
        assert all(len({contexts[slot] for slot in array.slots.values()}) == 1 for array in arrays)
        for slot, number in host.items():
            assert all(np.all(layer == 100 * place + number) for place, layer in enumerate(copies(kv, slot)))
    for place, layer in enumerate(map(np.asarray, kv.layers)):
        assert np.all(layer[0] == 100 * place), "padding writes nowhere"
        assert all(np.all(layer[slot] == 100 * place + number) for slot, number in device.items())


@pytest.fixture(scope="module", params=[(1, 2), (4, 3), (8, 1)], ids=str)
def kv(request: pytest.FixtureRequest) -> Pool:
    return pool(*request.param)


@settings(max_examples=8)
@given(steps=moves())
def test_pages_come_back_as_they_left_and_less_than_half_of_the_host_memory_is_empty(
    kv: Pool, steps: list[Move]
) -> None:
    check(kv, steps)


@pytest.mark.parametrize("staging", [1, 2, 16, 32])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_transfers_cover_all_pages_and_no_array_starts_half_empty(platform: str, staging: int) -> None:
    sizes = transfer_sizes(platform, staging)
    for count in range(1, 200):
        cover = _cover(count, sizes, staging)
        assert [first for first, _ in cover] == [sum(size for _, size in cover[:index]) for index in range(len(cover))]
        first, size = cover[-1]
        assert first < count <= first + size
        pages = min(size, staging)
        assert (count - first - 1) % pages + 1 > pages // 2
        assert {size for _, size in cover} <= set(sizes)


def test_a_full_step_of_whole_pages_leaves_room_among_the_executables_that_may_wait() -> None:
    sizes = transfer_sizes("gpu")
    assert max(len(_cover(out, sizes, 1)) + len(_cover(512 - out, sizes, 1)) for out in range(513)) <= 17


def test_a_step_with_more_transfers_than_an_upload_holds_has_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("packing", "pools"):
        monkeypatch.setattr(f"jinfercept.runner.{module}.MOST_TRANSFERS", 1)
    kv = pool(1, 2)
    monkeypatch.setattr(f"{__name__}.MOST_TRANSFERS", 1)
    everything = list(range(NUM_PAGES))
    offloads = [PageCopy(1 + page, page) for page in everything]
    assert len(kv.begin((), (), offloads)) > 1
    check(kv, [Move(everything, [], everything), Move([], [3, 5], everything[::-1])])


def test_arrays_that_the_device_has_no_memory_for_at_once_follow_the_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = pool(8, 2)
    kv.reset()
    everything = [PageCopy(1 + page, page, page // 8) for page in range(NUM_PAGES)]
    step(kv, [], [], everything)
    moved, copied = list[list[int]](), mesh.move

    def noting(arrays: Sequence[jax.Array], sharding: jax.sharding.Sharding) -> list[jax.Array]:
        moved.append([len(array) for array in arrays])
        return copied(arrays, sharding)

    monkeypatch.setattr("jinfercept.runner.pools.move", noting)
    step(kv, [everything[0], everything[8], everything[16]], [], [])  # a page of each array
    assert moved == [[8, 8], [8]], "a transfer of 16 comes in any case"
    moved.clear()
    step(kv, everything[:8], [], [])
    assert moved == [[8]]


def test_a_pool_is_kept_but_for_what_a_failed_step_has_donated() -> None:
    kv = pool(1, 2)
    kv.reset()
    kv.layers[0].delete()  # donated to a step that failed
    kept = kv.layers[1]
    kv.reset()
    assert [bool(layer.any()) for layer in kv.layers] == [False, False]
    assert kv.layers[1] is kept


SIZES: dict[str, Any] = {"kv_tokens": 112, "max_model_len": 100, "max_num_batched_tokens": 16, "attention": "reference"}


@pytest.mark.parametrize(
    ("family", "policy", "flags"),
    [
        ("llama_gqa", "min_waste", {"staging_pages": 4}),
        pytest.param("gemma3", "preserve", {"num_window_tokens": 120}, marks=pytest.mark.slow),
        pytest.param("gptj", "swap", {"staging_pages": 4}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "min_waste", {}, marks=pytest.mark.slow),
    ],
)
def test_pages_of_a_tpu_give_the_greedy_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, policy: str, flags: dict[str, Any]
) -> None:
    monkeypatch.setattr(page_transfers, "INTERLEAVED_ON", ("cpu",))
    with tiny_llm(family, policy=policy, **SIZES, **flags) as llm:
        outputs = Workload(number=8, seed=7).run(llm, delay_s=0.002)
        assert sum(count_ties(family, output) for output in outputs) <= 1
        assert llm.counters.interceptions > 0


def test_pages_in_fp8_give_the_same_tokens_wherever_they_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "INTERLEAVED_ON", ("cpu",))
    work = Workload(number=8, seed=7)
    with tiny_llm("llama_gqa", policy="swap", kv_cache_dtype="fp8", **SIZES) as llm:
        assert {pages.dtype for pages in llm.engine.setup.runner.kv.layers} == {FP8}
        swapped = streams(work.run(llm, delay_s=0.002))
        assert llm.counters.copied_out > 0
        llm.restart(policy="discard")
        assert streams(work.run(llm, delay_s=0.002)) == swapped
