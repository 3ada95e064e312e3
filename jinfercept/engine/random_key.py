"""The random keys of requests: what their draws depend on besides logits and positions."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import final

from jinfercept.request import Request


def random_key(seed: int, prompt_token_ids: Sequence[int], index: int, number: int | None = None) -> int:
    """A hash of 64 bits: equal arguments give equal random numbers, any other arguments independent ones.

    Args:
        seed: of the request, or of the engine if the request has none; of any size and sign, all of which counts.
        prompt_token_ids: of the request as it was submitted.
        index: the request's place among the outputs of its prompt.
        number: the request's place among all requests of the engine, if it has no seed.
    """
    size = (seed.bit_length() + 8) // 8
    fields = array("q", (size, index, -1 if number is None else number)).tobytes()
    digest = blake2b(fields + seed.to_bytes(size, "little", signed=True), digest_size=8, person=b"jinfercept draw")
    ids = prompt_token_ids if isinstance(prompt_token_ids, array) else array("i", prompt_token_ids)
    digest.update(ids.tobytes())
    return int.from_bytes(digest.digest(), "little")


@final
class RandomKeys:
    """Gives every request of one engine its random key.

    Args:
        seed: of requests that have none, each of which has a key of its own.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._numbers = seed, count()

    def of_next(self, request: Request) -> int:
        """The random key of the next request that the engine takes; 0 for a greedy one."""
        number, seed, prompt = next(self._numbers), request.params.seed, request.prompt_token_ids
        if request.params.temperature == 0:
            return 0
        return (
            random_key(self._seed, prompt, request.index, number)
            if seed is None
            else random_key(seed, prompt, request.index)
        )
