"""`PrefixRouter`: Ray Serve's way to a replica, by `choice.ranked`."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tandem.ray.choice import ranked

PATH = f"{__name__}.PrefixRouter"


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Requests say `key` and `avoid` beside their own arguments."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each in a rank of its own: the next one is asked only when the one before takes no more."""
        fields = {} if pending_request is None else pending_request.kwargs
        by_name = {name_of(each.replica_id): each for each in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in by_name.items()}
        return [[by_name[name]] for name in ranked(fields.get("key", b""), queues, fields.get("avoid", ()))]


def name_of(replica: ReplicaID) -> str:
    return str(replica.unique_id)
