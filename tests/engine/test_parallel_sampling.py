"""Requests that share a prompt: the first computes it, the others wait for it, and nobody waits for one that is gone."""

from itertools import product

import pytest

from jinfercept.engine.parallel_sampling import forks, joined
from jinfercept.engine.session import random_key
from jinfercept.events import Finished
from jinfercept.outputs import RequestOutput
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from tests.support.fake_engine import POLICIES, make_engine, next_token, run_all

PROMPT = tuple(range(1, 24))
PARAMS = SamplingParams(n=3, max_tokens=5, seed=0)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["copy_ahead", "discard"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_prompt_is_computed_once_in_chunks_of_any_size(policy: str, depth: int, prefix_caching: bool) -> None:
    for chunk_tokens in (1, 3, 100):
        engine = make_engine(
            POLICIES[policy](), num_pages=40, chunk_tokens=chunk_tokens, depth=depth, prefix_caching=prefix_caching
        )
        requests = forks(Request("a", PROMPT, PARAMS))
        [output] = joined(requests, run_all(engine, requests))
        assert len(output.outputs) == 3
        own = 5 + len(PROMPT) % 4  # what was generated, and the tail that is shared with nobody
        assert engine.scheduler.counters.computed <= len(PROMPT) + 3 * own


def test_others_pass_while_forks_wait() -> None:
    engine = make_engine(POLICIES["copy_ahead"](), num_pages=40, chunk_tokens=2, buckets=(4, 16))
    family = forks(Request("a", PROMPT, PARAMS))
    stranger = Request("b", (50, 51), SamplingParams(max_tokens=2))
    for request in (*family, stranger):
        engine.submit(request)
    order = []
    while engine.has_work:
        order += [event.request_id for event in engine.step() if isinstance(event, Finished)]
    assert order[0] == "b"
    assert sorted(order) == ["a", "a/1", "a/2", "b"]


@pytest.mark.parametrize("depth", [0, 1])
def test_forks_go_on_without_a_first_that_was_given_up(depth: int) -> None:
    engine = make_engine(POLICIES["copy_ahead"](), num_pages=40, chunk_tokens=2, depth=depth)
    for request in forks(Request("a", PROMPT, PARAMS)):
        engine.submit(request)
    engine.step()
    engine.abort("a")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    assert outputs["a"].outputs[0].finish_reason == "abort"
    for name in ("a/1", "a/2"):
        assert outputs[name].outputs[0].finish_reason == "length"
        assert outputs[name].outputs[0].token_ids[0] == next_token(list(PROMPT))


DRAWN_PROMPT = (1, 2, 3)


def test_everything_that_tells_requests_apart_counts() -> None:
    seeds = [
        0,
        1,
        -1,
        255,
        -255,
        256,
        2**31,
        2**32,
        -(2**32),
        2**32 + 1,
        2**63,
        2**64,
        -(2**64),
        10**5000,
        10**5000 + 1,
    ]
    prompts = [
        DRAWN_PROMPT,
        (3, 2, 1),
        (1, 2),
        (1, 2, 3, 0),
        (0, 1, 2, 3),
        (1, 2, 3 + (1 << 16)),
        tuple(range(100_000)),
    ]
    numbers = [None, 0, 1, 2**32]
    keys = {random_key(*fields) for fields in product(seeds, prompts, range(3), numbers)}
    assert len(keys) == len(seeds) * len(prompts) * 3 * len(numbers)


def test_a_random_key_has_64_bits_and_stays_what_it_is() -> None:
    assert random_key(2**32, DRAWN_PROMPT, 0) == random_key(2**32, list(DRAWN_PROMPT), 0) == 12538671989558557137
    keys = [random_key(number, DRAWN_PROMPT, 0) for number in range(64)]
    assert all(4 < sum(key >> bit & 1 for key in keys) < 60 for bit in range(64))
