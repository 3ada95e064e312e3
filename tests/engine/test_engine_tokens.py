"""The engine on a runner whose KV is the tokens: the same tokens whatever happens, and an end for everybody."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfercept.kv.page import Residency
from tests.support.engine_requests import DEPTHS, only, request, serve
from tests.support.fake_engine import POLICIES, VOCAB, run_all, sampled_depths, uninterrupted
from tests.support.scheduler_bench import Scripted


@dataclass(frozen=True)
class Workload:
    """A set of requests, the machine that serves them, and how long calls take."""

    requests: tuple[tuple[tuple[int, ...], int, tuple[tuple[int, tuple[int, ...]], ...]], ...]
    latencies: tuple[float, ...]
    options: tuple[tuple[str, Any], ...]
    places: tuple[Residency, ...]


def draw_workload(seed: int) -> Workload:
    """Prompts that share beginnings, calls anywhere, a pool that is too small, in every size of everything."""
    rng = random.Random(seed)
    page_size, num_pages = rng.choice([1, 2, 4, 8]), rng.choice([5, 8, 12, 40])
    limit = max(4, min(num_pages * page_size, rng.choice([20, 60, 1000])))
    shared = [rng.randrange(VOCAB) for _ in range(60)] * 8
    requests = []
    for _ in range(rng.choice([1, 3, 8, 16])):
        length = rng.randrange(1, limit)
        num_shared = rng.choice([length // 2, length // 2, length // 2, length])
        prompt = shared[:num_shared] + [rng.randrange(VOCAB) for _ in range(length - num_shared)]
        calls = {
            rng.randrange(1, 15): tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 12])))
            for _ in range(rng.randrange(4))
        }
        requests.append((tuple(prompt), rng.randrange(1, 20), tuple(calls.items())))
    options = {
        "page_size": page_size,
        "num_pages": num_pages,
        "num_host_pages": rng.choice([0, 3, 100]),
        "max_model_len": limit,
        "max_num_seqs": rng.choice([1, 2, 4]),
        "chunk_tokens": rng.choice([1, 3, 100]),
        "prefix_caching": rng.random() < 0.7,
        "link_tokens_per_s": rng.choice([1.0, 1e9]),
    }
    latencies = tuple(rng.choice([0, 0.001, 0.1]) for _ in range(7))
    places = tuple(rng.choice(list(Residency)) for _ in range(50))
    return Workload(tuple(requests), latencies, tuple(options.items()), places)


def check_same_tokens(name: str, depth: int, workload: Workload) -> None:
    """Serve the workload and compare every stream with that of an undisturbed run."""

    def placed(sequence: Any, index: int) -> Residency:
        return workload.places[(index * 7 + len(sequence.tokens)) % len(workload.places)]

    options = dict(workload.options)
    engine = serve(
        Scripted(placed) if name == "scripted" else POLICIES[name](),
        latency=lambda call: workload.latencies[len(call.arguments) % len(workload.latencies)],
        depth=depth,
        **options,
    )
    requests, expected = [], {}
    for index, (prompt, max_tokens, calls) in enumerate(workload.requests):
        script = {count: list(tokens) for count, tokens in calls}
        requests.append(request(f"r{index}", list(prompt), max_tokens, script))
        expected[f"r{index}"] = uninterrupted(prompt, requests[-1].params, script, options["max_model_len"])
    outputs = run_all(engine, requests)
    assert {name: done.outputs[0].token_ids for name, done in outputs.items()} == expected
    assert all(done.outputs[0].finish_reason == "length" for done in outputs.values())


@pytest.mark.parametrize(("policy", "depth"), [*sampled_depths(), ("scripted", 1)])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32))
def test_every_policy_gives_the_tokens_of_an_undisturbed_run(policy: str, depth: int, seed: int) -> None:
    check_same_tokens(policy, depth, draw_workload(seed))


@DEPTHS
@settings(max_examples=25)
@given(
    places=st.lists(st.sampled_from(Residency), min_size=7, max_size=7),
    returned=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    chunk_tokens=st.sampled_from([1, 2, 5, 100]),
    caching=st.booleans(),
)
def test_any_mix_of_residencies_gives_the_same_tokens(
    depth: int, places: list[Residency], returned: list[int], chunk_tokens: int, caching: bool
) -> None:
    """One request alone, page by page: what was found, fetched and recomputed adds up, too."""
    policy = Scripted(lambda sequence, index: places[index % 7])
    engine = serve(
        policy, num_pages=12, num_host_pages=12, depth=depth, chunk_tokens=chunk_tokens, prefix_caching=caching
    )
    single = request("a", list(range(23)), 6, {3: returned})
    output = only(run_all(engine, [single]))
    assert output.token_ids == uninterrupted(single.prompt_token_ids, single.params, {3: returned}, 48)
    (interception,) = output.interceptions
    assert interception.context is not None
    assert sum(interception.context) == 25 + depth, "at depth one the call's own token has its KV"
    computed = engine.scheduler.counters
    assert computed.recomputed >= interception.context.recomputed
    assert computed.copied_in == interception.context.copied_in
