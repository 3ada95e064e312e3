"""The order in which a runner dispatches what a plan asks for: what hides transfers on a GPU, whose streams keep it.

A copy overlaps the compute that is dispatched after it; a landing waits for its copy on the compute's own stream. A GPU copies
in the order in which copies may begin: pages that come in wait for the embedding, and so for the upload.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jinfercept.kv.page import PageCopy
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import Model
from jinfercept.pallas.work_schedule import WorkCut
from jinfercept.runner.executables import Executables
from jinfercept.runner.page_transfers import CPU_TRANSFERS
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import Chunk, NewPages, Sample, StepPlan
from tests.support.tiny_model import GOLDEN

LOADED = load(GOLDEN / "llama_gqa", dtype="float32")
MODEL = Model(LOADED.model.config, joined=False)  # no kernel of a CPU rotates
LAYERS = MODEL.config.num_layers
SHAPE = RunnerShape(num_pages=24, page_size=4, max_num_seqs=1, max_model_len=16, buckets=(4,), layers_per_step=1)
FIRST = StepPlan(0, 4, (Chunk(0, 0, (1, 2, 3, 4), NewPages(0, [1]), None),), offload=(PageCopy(1, 0),))
BOTH_WAYS = StepPlan(
    1,
    4,
    (Chunk(0, 4, (5, 6), NewPages(1, [2]), Sample(0.0, 0)),),
    offload=(PageCopy(1, 1),),
    fetch=(PageCopy(3, 0),),
    drop=(0,),
)
SAMPLING = ["head 4 1", "sample 1 greedy"]


def dispatched(*plans: StepPlan) -> list[list[str]]:
    """The names of executables and the destinations of copies, in the order in which each plan's were dispatched."""
    runner = ModelRunner(MODEL, separate(LOADED.params), SHAPE, attention="reference")
    runner.warm_up()
    seen: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        look_up, put, wait = Executables.__getitem__, jax.device_put, jax.block_until_ready

        def noting_look_up(run: Executables, key: tuple[Any, ...]) -> Any:
            executable, name = look_up(run, key), " ".join(map(str, key))
            seen[-1].append(name)

            def call(*arguments: Any) -> Any:
                if uploads := [leaf for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, jax.Array)]:
                    seen[-1].insert(-1, f"upload {len(uploads)}")
                return executable(*arguments)

            return call

        def noting_put(what: Any, where: jax.sharding.Sharding) -> Any:
            own = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(what))
            seen[-1].append(f"upload {len(jax.tree.leaves(what))}" if own else f"to {where.memory_kind}")
            return put(what, where)

        def noting_wait(what: Any) -> Any:
            seen[-1].append("wait")
            return wait(what)

        patch.setattr(Executables, "__getitem__", noting_look_up)
        patch.setattr(jax, "block_until_ready", noting_wait)
        patch.setattr(jax, "device_put", noting_put)
        for plan in plans:
            seen.append([])
            runner.collect(runner.submit(plan))
    runner.close()
    return seen


def moves(*compute: str) -> list[str]:
    """One page's way in and another one's out, around the compute of the layers."""
    return ["to device", "gather 1", "to pinned_host", *compute, "scatter 1"]


def test_whole_pages_start_right_behind_what_waits_for_the_only_upload_and_land_after_the_last_layer() -> None:
    first, both = dispatched(FIRST, BOTH_WAYS)
    compute = ["layers 4 1"] * LAYERS
    assert first == ["upload 1", "embed 4", "gather 1", "to pinned_host", *compute]
    assert both == ["upload 1", "embed 4", *moves(*compute), *SAMPLING]


def test_a_plan_without_compute_only_moves() -> None:
    _, transfers = dispatched(FIRST, replace(BOTH_WAYS, bucket=0, chunks=()))
    assert transfers == ["upload 1", *moves(), "wait"]


def test_steps_of_decode_rows_only_have_executables_of_their_own_where_attention_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jinfercept.runner.steps.cut_for", lambda *_, **__: WorkCut(1, 8, 16, 16))
    decode = StepPlan(1, 4, (Chunk(0, 4, (5,), NewPages(1, [2]), Sample(0.0, 0)),))
    mixed, alone = dispatched(FIRST, decode)
    assert [name for name in mixed if "embed" in name or "layers" in name] == ["embed 4", *["layers 4 1"] * LAYERS]
    assert alone == ["upload 1", "decode embed 4", *["decode layers 4 1"] * LAYERS, *SAMPLING]


def test_many_pages_cross_in_one_call_each_way_and_are_gathered_by_the_largest_executables() -> None:
    count = CPU_TRANSFERS[0] + 1
    pages = tuple(PageCopy(1 + index, index) for index in range(count))
    out, back = dispatched(StepPlan(0, 0, offload=pages), StepPlan(1, 0, fetch=pages))
    full = CPU_TRANSFERS[0]
    assert out == ["upload 1", f"gather {full}", "to pinned_host", "gather 1", "to pinned_host", "wait"]
    assert back == ["upload 1", "to device", f"scatter {full}", "scatter 1", "wait"]


def test_pages_of_two_steps_may_be_under_way_and_a_third_waits_for_the_first() -> None:
    decode = StepPlan(0, 4, (Chunk(0, 4, (5,), (), None),))
    steps = [replace(decode, offload=(PageCopy(1, slot),)) for slot in range(1, 5)]
    without, *rest = dispatched(FIRST, *steps, decode, decode, decode)[1:]
    assert without.count("wait") == 0
    assert ["wait" in step for step in rest] == [True, True, True, True, True, False]
    assert all(step[0] == "wait" for step in rest[:5])


def test_the_pool_takes_its_memory_when_all_is_compiled() -> None:
    runner = ModelRunner(MODEL, separate(LOADED.params), SHAPE, attention="reference")
    pages: list[int] = []
    runner.warm_up(lambda *_: pages.append(len(runner.kv.layers)), most_at_once=1)
    assert pages
    assert not any(pages)
    assert len(runner.kv.layers) == LAYERS
    runner.close()


def test_a_call_of_all_layers_takes_their_norms_as_one_array_for_each_name() -> None:
    params = separate(LOADED.params)
    runner = ModelRunner(MODEL, params, replace(SHAPE, layers_per_step=LAYERS), attention="reference")
    runner.warm_up(only=[key := ("layers", 4, LAYERS)])
    matrices, vectors = (
        sum((weight.ndim == 1) == is_vector for weight in params.layers[0].values()) for is_vector in (0, 1)
    )
    num_arrays = len(jax.tree.leaves(runner.executables.ready[key].args_info))
    assert (LAYERS, vectors) == (3, 2)
    assert num_arrays == LAYERS * (matrices + 1) + vectors + 1 + 7, (
        "with a layer's pages, the tokens' vectors and the parts of the batch, which a GPU's kernels read in one array"
    )
