"""`Reservations`: the ids and the adapters of requests that are not finished."""

from typing import final

from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.errors import RequestError
from jinfercept.request import Request


@final
class Reservations:
    """What requests hold from their submission to their end. `take` may be called from any thread.

    Args:
        adapters: that requests may have.
    """

    def __init__(self, adapters: AdapterTable) -> None:
        self._adapters = adapters
        self._ids: dict[str, object] = {}

    def take(self, request: Request) -> None:
        """Take a request's id and its adapter. Raises `RequestError` if the id is taken or the adapter not there any more."""
        mark = object()
        if self._ids.setdefault(request.id, mark) is not mark:  # atomic: two threads may submit one id
            raise RequestError("an unfinished request already has this id", got=request.id, fix="use another id")
        try:
            self._adapters.hold(request)
        except RequestError:
            del self._ids[request.id]
            raise

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self._adapters.release(request_id)
        self._ids.pop(request_id, None)

    def clear(self) -> None:
        """Release all of them."""
        for request_id in [*self._ids]:
            self.release(request_id)
