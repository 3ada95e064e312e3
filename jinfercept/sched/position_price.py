"""The price of computing tokens by where in their context they are: attention makes later ones dearer. Plans nothing."""

from typing import final

from jinfercept.sched.cost import CostModel


@final
class PositionPrice:
    """Seconds of computing parts of a context, by the steps that compute it whole."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost, self._chunk_tokens = cost, chunk_tokens
        self._whole_s = [0.0]  # seconds of computing the first chunks, by their number

    def between_s(self, start: int, end: int) -> float:
        """Seconds of computing the tokens `start … end - 1` of a context whose earlier tokens are there."""
        return self._first_s(end) - self._first_s(start)

    def token_s(self, position: int) -> float:
        """Seconds of computing one token at a position, as part of a full step."""
        chunk = position // self._chunk_tokens
        return (self._chunks_s(chunk + 1) - self._chunks_s(chunk)) / self._chunk_tokens

    def _first_s(self, num_tokens: int) -> float:
        chunks, rest = divmod(num_tokens, self._chunk_tokens)
        seconds = self._chunks_s(chunks)
        return seconds + (self._chunks_s(chunks + 1) - seconds) * rest / self._chunk_tokens if rest else seconds

    def _chunks_s(self, number: int) -> float:
        whole_s = self._whole_s
        while len(whole_s) <= number:
            whole_s.append(self._cost.recompute_s(len(whole_s) * self._chunk_tokens, self._chunk_tokens))
        return whole_s[number]
