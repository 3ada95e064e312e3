"""A request on its way through Ray's router: it asks the front for a route, and notes which replica has taken it.

Ray passes keyword arguments of a call unchanged to the request router of the same process, and pickled to the replica. So a
ticket brings the router the front's tables; a replica gets the keys alone.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

from jinfercept.fleet.conversations import RoutingHint
from jinfercept.fleet.http_call import HttpCall
from jinfercept.fleet.routes import Reports, Routes
from jinfercept.fleet.routing import Route


class IncomingRequest(NamedTuple):
    """A request that was read.

    Attributes:
        prefer: the replica that shall answer if it runs; "": any.
        background: whether it asks for a response in the background.
    """

    call: HttpCall
    hint: RoutingHint
    prefer: str
    salt: str
    background: bool


@final
class Ticket:
    """One attempt to have a request answered.

    Args:
        prefer: replica that shall answer if it runs; "": by price.

    Attributes:
        route: of the replica that has taken the request; None before.
    """

    def __init__(self, table: Routes, hint: RoutingHint, prefer: str = "") -> None:
        self._table, self.hint, self._prefer = table, hint, prefer
        self._chosen: Route | None = None
        self.route: Route | None = None

    @property
    def chosen(self) -> str:
        """The replica that was chosen last; "": none."""
        return self._chosen.replica if self._chosen is not None else ""

    def choose(self, reports: Reports) -> str:
        """The name of a replica among the running ones. Decides again if it is called again for other replicas."""
        if self._chosen is None or self._chosen.replica not in reports:
            self._chosen = self._table.choose(self.hint, self._prefer, reports)
        return self._chosen.replica

    def taken(self, replica: str) -> None:
        """Note which replica has taken the request."""
        if self._chosen is not None:
            self.route = self._table.taken(self.hint, self._chosen, replica)

    def __reduce__(self) -> tuple[type["Contents"], tuple[str, tuple[bytes, ...]]]:
        """Pickles the part that a replica gets."""
        hint = self.hint
        longest = hint.prefixes[0].key if hint.prefixes else None
        return Contents, (hint.tenant, tuple(key for key in (hint.named, longest) if key is not None))


@final
class Contents:
    """The part of a ticket that a replica gets.

    Args:
        keys: under which a follow-up will look for the context of this request.
    """

    def __init__(self, tenant: str, keys: Sequence[bytes]) -> None:
        self.tenant, self.keys = tenant, tuple(keys)
