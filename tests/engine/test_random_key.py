"""Random keys: equal requests have equal ones, any others do not."""

from itertools import product

from jinfercept.engine.session import random_key, request_key
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams

PROMPT = (1, 2, 3)


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
    prompts = [PROMPT, (3, 2, 1), (1, 2), (1, 2, 3, 0), (0, 1, 2, 3), (1, 2, 3 + (1 << 16)), tuple(range(100_000))]
    numbers = [None, 0, 1, 2**32]
    keys = {random_key(*fields) for fields in product(seeds, prompts, range(3), numbers)}
    assert len(keys) == len(seeds) * len(prompts) * 3 * len(numbers)


def test_a_random_key_has_64_bits_and_stays_what_it_is() -> None:
    assert random_key(2**32, PROMPT, 0) == random_key(2**32, list(PROMPT), 0) == 12538671989558557137
    keys = [random_key(number, PROMPT, 0) for number in range(64)]
    assert all(4 < sum(key >> bit & 1 for key in keys) < 60 for bit in range(64))


def test_requests_without_seeds_have_keys_of_their_own_and_greedy_ones_need_none() -> None:
    def keys(engine_seed: int) -> list[int]:
        params = [SamplingParams(), SamplingParams(temperature=0.0, seed=3), SamplingParams(seed=0), SamplingParams()]
        return [request_key(Request("a", PROMPT, each), engine_seed, number) for number, each in enumerate(params)]

    first, greedy, seeded, last = keys(0)
    assert (greedy, seeded) == (0, random_key(0, PROMPT, 0))
    assert keys(0) == [first, greedy, seeded, last]
    assert len({first, seeded, last, *keys(1)}) == 6
