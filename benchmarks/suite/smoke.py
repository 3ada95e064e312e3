"""Whether the engine works on this machine at all: a default start of a large model, as users start it, and moved contexts.

Rows: `check`, `ok`, and

* start: `seconds`, `load_s` and `compile_s` of them, `executables` and how many of them were `cached`, how many are `pending`,
  the pool's `kv_tokens`, `peak_bytes` and `limit_bytes` of the device;
* moved tokens: `policy`, `tokens`, `copied_in_tokens` and `different`; one request at a time, so that its steps have the shapes
  of those that keep its context, and equal values by every policy;
* compiled: the executables that the start left behind, compiled and tuned beside a full pool: `seconds`, `executables`,
  `peak_bytes` and `limit_bytes`.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks.replay import different, random_tokens, replay
from benchmarks.suite.sizes import Row, Sizes
from jinfercept.sim.scripted import make_request
from jinfercept.sim.workload import Script, Segment
from jinfercept.start.start import EngineSetup, set_up

KEEPING = "preserve"
MOVING = ("swap", "copy_ahead")
REQUESTS = 2
LONGEST_S = 10.0
"""Of a request, which takes about one."""


def rows(sizes: Sizes) -> Iterator[Row]:
    """Start lazily, move contexts, and compile what the start left behind."""
    logging.basicConfig(level=logging.INFO)  # on standard error, which tells how far a start came that was cut off
    config = next(iter(sizes.models.values()))
    began_s = time.monotonic()
    # a measured profile is what `policies` starts with
    with closing(set_up(config, load_format="dummy", profile="paper-gptj-6b-a100", lazy=True, **sizes.start)) as setup:
        yield _started(setup, time.monotonic() - began_s)
        setup.runner.executables.compile_behind()
        yield from _moved(setup)
        yield _compiled(setup)


def _started(setup: EngineSetup, seconds: float) -> Row:
    times = setup.times
    return {
        "check": "start",
        "seconds": seconds,
        "load_s": times.load_s,
        "compile_s": times.compile_s,
        "executables": times.num_executables,
        "cached": times.num_cached,
        "pending": times.num_pending,
        "kv_tokens": setup.memory_plan.kv_tokens,
        **_memory(setup),
        "ok": True,
    }


def _memory(setup: EngineSetup) -> Row:
    stats = setup.runner.device.memory_stats() or {}
    return {"peak_bytes": stats.get("peak_bytes_in_use"), "limit_bytes": stats.get("bytes_limit")}


def _compiled(setup: EngineSetup) -> Row:
    executables, began_s = setup.runner.executables, time.monotonic()
    keys = executables.pending
    for key in keys:
        executables[key]  # compiles it, or waits for the thread that does
    seconds = time.monotonic() - began_s
    return {"check": "compiled", "seconds": seconds, "executables": len(keys), **_memory(setup), "ok": True}


def _moved(setup: EngineSetup) -> Iterator[Row]:
    """The tokens of requests whose contexts move while they call, against those of kept ones."""
    write = random_tokens(setup.model.config.vocab_size, 0)
    script = Script("chat", 40, (Segment(6, 0.05, 7), Segment(5, 0.03, 9), Segment(6, None, 0)))
    requests = [make_request(number, script, write) for number in range(REQUESTS)]

    def serve(policy: str) -> tuple[dict[str, list[int]], int]:
        runs = [replay(setup, policy, [(0.0, request)], write, LONGEST_S) for request in requests]
        streams = {name: stream for run in runs for name, stream in run.streams.items()}
        return streams, sum(run.report["copied_in_tokens"] for run in runs)

    kept, _ = serve(KEEPING)
    for policy in MOVING:
        streams, copied = serve(policy)
        wrong = different(streams, kept)
        yield {
            "check": "moved tokens",
            "policy": policy,
            "tokens": sum(map(len, streams.values())),
            "copied_in_tokens": copied,
            "different": wrong,
            "ok": not wrong and len(streams) == len(kept) == REQUESTS and (copied > 0 or policy != "swap"),
        }
