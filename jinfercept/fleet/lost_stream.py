"""The last event of a stream that cannot be finished, in the dialect of its route."""

import re

from jinfercept.protocols.encoding import DONE, encode_event
from jinfercept.protocols.errors import ApiError

LOST = "replica_lost"
"""Code of errors of requests whose replica has ended."""

_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_TAIL_BYTES = 2**16


def lost_error() -> ApiError:
    """Status 503, for a request whose replica has ended before its answer began."""
    message = "the replica that worked on the request has ended; send the request again"
    return ApiError(503, message, code=LOST, headers={"Retry-After": "1"})


def last_event(error: ApiError, path: str, last: bytes) -> bytes:
    """The event.

    Args:
        error: why the stream ends.
        last: end of what was sent of the stream.
    """
    if path.startswith("/v1/responses"):
        numbers = _NUMBER.findall(last[-_TAIL_BYTES:])
        event = {
            "type": "error",
            "code": error.code,
            "message": error.detail,
            "param": None,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return encode_event(event, "error")
    if path.startswith("/v1/messages"):
        return encode_event({"type": "error", "error": {"type": "api_error", "message": error.detail}}, "error")
    return encode_event(error.body) + DONE
