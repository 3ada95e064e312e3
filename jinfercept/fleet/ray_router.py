"""Ray Serve's request router that asks the front: an adapter of `Ticket`. Imports Ray; tested with Ray 2.60."""

import logging
from typing import Any, final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

log = logging.getLogger("jinfercept.server")


@final
class ConversationRouter(RequestRouter):
    """Chooses the replica that a request's ticket names; if that one cannot be reached, any other."""

    queue_len_response_deadline_s = 1.0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best one first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before it is asked again; otherwise Ray spins
        ticket = _ticket(pending_request)
        if ticket is None:
            return [list(candidate_replicas)]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            chosen = by_name.pop(ticket.choose({name: replica.routing_stats for name, replica in by_name.items()}))
        except Exception:  # Ray would leave the request without an answer
            log.exception("no route was found")
            return [list(candidate_replicas)]
        return [[chosen], list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Tell the ticket which replica has taken the request."""
        ticket = _ticket(pending_request)
        if ticket is not None:
            ticket.taken(replica_id.unique_id)


def _ticket(request: PendingRequest | None) -> Any:
    return None if request is None else request.kwargs.get("ticket")
