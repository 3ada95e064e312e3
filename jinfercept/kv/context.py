"""A request's KV as an ordered list of pages."""

from typing import NamedTuple

from jinfercept.kv.page import Page


class Context:
    """The pages of one sequence, first token first; mutable, owned by the `KVManager`.

    `held` says whether the references on its pages pin them (the sequence runs) or are evictable (it does not). `ready` is
    the number of leading tokens whose KV is on the device and readable now; it is valid only while the context is held.
    `chain` holds the digests of the leading full pages whose tokens are accepted. `shared`: pages of other contexts are or
    were among the pages.
    """

    __slots__ = ("chain", "held", "pages", "ready", "root", "shared")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.pages: list[Page] = []
        self.chain: list[bytes] = []
        self.held = False
        self.shared = False
        self.ready = 0


class ContextResidency(NamedTuple):
    """Tokens of a context by place, when its sequence starts to run.

    Attributes:
        device: readable on the device.
        host: only on the host, to be fetched.
        missing: at neither place, to be recomputed.
    """

    device: int
    host: int
    missing: int
