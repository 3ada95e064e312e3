"""Pages of the items of a response or a conversation."""

from collections.abc import Sequence

from starlette.responses import Response

from jinfercept.protocols.encoding import encode
from jinfercept.protocols.errors import ApiError
from jinfercept.protocols.openai.response_items import Item

_PAGE_BYTES = 2**24
"""Bytes of items after which a page ends, whatever its limit."""


def item_page(items: Sequence[Item], limit: int, order: str, after: str | None) -> Response:
    """A page of items behind the one with the id `after`, as an HTTP response. Raises 400 if no item has that id."""
    items = items[::-1] if order == "desc" else items
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError.bad(f"no item of this list has the id {after[:200]!r}", "after")
        items = items[places[-1] + 1 :]
    shown: list[bytes] = []
    num_bytes = 0
    for item in items[:limit]:
        if num_bytes < _PAGE_BYTES:
            shown.append(encode(item))
            num_bytes += len(shown[-1])
    number = len(shown)
    first, last = (items[0]["id"], items[number - 1]["id"]) if number else (None, None)
    head = encode({"object": "list", "first_id": first, "last_id": last, "has_more": len(items) > number})
    return Response(head[:-1] + b',"data":[' + b",".join(shown) + b"]}", media_type="application/json")
