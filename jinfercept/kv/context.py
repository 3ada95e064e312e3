"""A request's KV, as an ordered list of pages. Knows the pages, not the tokens and not where requests stand."""

from typing import NamedTuple

from jinfercept.kv.page import Page


class Context:
    """The pages of one sequence, first token first; mutable, owned by the `KVManager`.

    `held` says whether the references on its pages pin them (the sequence runs) or are evictable (it does not). `ready` is
    the number of leading tokens whose KV is on the device and readable now; it is valid only while the context is held.
    `chain` holds the digests of the leading full pages whose tokens are accepted.
    """

    __slots__ = ("chain", "held", "pages", "ready", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.pages: list[Page] = []
        self.chain: list[bytes] = []
        self.held = False
        self.ready = 0


class Found(NamedTuple):
    """Tokens of a context that is about to run: readable on the device, to be fetched from the host, to be recomputed."""

    device: int
    host: int
    missing: int
