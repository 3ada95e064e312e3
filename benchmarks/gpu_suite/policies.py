"""The six policies of the paper and ours on a scaled mixed workload, in real time, on one model. Rows: replay's reports.

Also `workload` (its sizes), `served`, and `other_tokens`: requests whose tokens are not those of the first policy (in
bfloat16 a step's shape may decide a near tie, so that a few may differ).
"""

from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

from benchmarks.gpu_suite.sizes import GIB, Row, Sizes
from jinfercept.bench.replay import Replayed, different, replay, resize_host
from jinfercept.models.model import kv_bytes_per_token
from jinfercept.sim.arrivals import arrivals
from jinfercept.sim.scripted import make_request, random_tokens, scaled
from jinfercept.sim.workload import draw
from jinfercept.startup.start import set_up

POLICIES = ("copy_ahead", "min_waste", "discard", "swap", "improved_discard", "preserve")


def rows(sizes: Sizes) -> Iterator[Row]:
    """Replay all policies, one after the other."""
    load = sizes.policies
    config = sizes.models[load.model]
    rng = Random(0)
    drawn = arrivals(lambda: draw("mixed", rng, "trace"), load.rate, load.duration_s, rng)
    write = random_tokens(config.vocab_size, 0)
    requests = [
        (at_s, make_request(number, script, write))
        for number, (at_s, script) in enumerate(scaled(drawn, load.scale_tokens, load.scale_time))
    ]
    duration_s = load.duration_s * load.scale_time
    flags: dict[str, Any] = {
        "dtype": sizes.dtype,
        "page_size": sizes.page_size,
        "kv_tokens": load.kv_tokens,
    }
    host_bytes = load.host_tokens * kv_bytes_per_token(config, sizes.dtype)
    flags |= {"max_num_seqs": load.max_num_seqs, "max_num_batched_tokens": load.bucket, "swap_space": host_bytes / GIB}
    first: Replayed | None = None
    with closing(set_up(config, load_format="dummy", profile="quick", **flags)) as setup:
        setup = resize_host(setup, load.host_tokens)
        for policy in POLICIES:
            run = replay(setup, policy, requests, write, duration_s)
            first = first or run
            yield run.report | {
                "model": load.model,
                "workload": load._asdict() | {"requests": len(requests)},
                "served": len(run.streams),
                "other_tokens": len(different(run.streams, first.streams)),
            }
