"""Refuses requests whose first token is likely to come later than their key or the server allows."""

import random
from collections.abc import Sequence
from typing import final

from jinfercept.llm import LLM
from jinfercept.protocols.errors import ApiError
from jinfercept.request import Request
from jinfercept.sched.first_token import FirstTokenAdmission
from jinfercept.sched.load import QueuedWork
from jinfercept.server.access.key_limits import retry_after

_SPREAD = 0.25
"""Refused clients are asked to wait up to this share longer, so that they do not come back at one moment."""


@final
class Overload:
    """Decides about the requests of one server."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._admission = FirstTokenAdmission(llm.profile, llm.shape.buckets[-1])
        self._random = random.Random()

    def check(self, requests: Sequence[Request], limit_s: float) -> None:
        """Take the requests of one body, or refuse them. Taken ones are submitted before the next ones are checked.

        Args:
            requests: of one tenant and one priority.
            limit_s: most seconds to the last one's first token.

        Raises:
            ApiError: 429, with the predicted seconds until they would be taken in `Retry-After`.
        """
        engine = self._llm.engine
        for request_id, first_token_s in engine.take_first_tokens():
            self._admission.ended(request_id, first_token_s)
        works = [engine.work_of(request) for request in requests if request.leader is None]
        tokens, uncomputed = sum(work.num_tokens for work in works), sum(work.uncomputed for work in works)
        tenant, weight, priority, _, _ = works[0]
        work = QueuedWork(tenant, weight, priority, tokens, uncomputed)
        decision = self._admission.decide(engine.load(), work, limit_s)
        if decision.retry_s is not None:
            wait_s = decision.retry_s * self._random.uniform(1.0, 1.0 + _SPREAD)
            message = (
                f"the first token would come after about {decision.forecast_s:.1f} s, and {limit_s:g} s is the limit"
            )
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": retry_after(wait_s)})
        if len(works) == 1:
            self._admission.began(requests[0].id, tenant, decision, limit_s)
