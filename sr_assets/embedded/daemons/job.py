"""What a fleet of daemons does, and what it has done so far; both pass between processes."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields

from sr_assets.domain.choria_rpc import REGISTRATION_SUBJECT, agent_names, collective_names
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.embedded.fleet_plan import FleetPlan


@dataclass(frozen=True, slots=True)
class Job:
    """A fleet: its plan and server, the agents and collectives of each node, and how registrations travel.

    With `adapter`, nodes send Choria's requests to `ingest` without JetStream, and the adapter stores them under `subject`.
    Otherwise each node publishes into the stream that takes `subject`, until acknowledged.
    """

    plan: FleetPlan
    cluster: ClusterSettings
    subject: str
    for_seconds: float | None = None
    agent_count: int = 2
    collective_count: int = 1
    adapter: bool = False
    ingest: str = REGISTRATION_SUBJECT
    rpc: bool = False
    processes: int = 1
    agents: list[str] = field(init=False)
    collectives: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "agents", agent_names(self.agent_count))
        object.__setattr__(self, "collectives", collective_names(self.collective_count))


@dataclass(slots=True)
class Counters:
    """What a process of the fleet has done."""

    connected: int = 0
    connects: int = 0
    connect_errors: int = 0
    disconnects: int = 0
    published: int = 0
    published_bytes: int = 0
    retried: int = 0
    dropped: int = 0
    requests: int = 0
    replies: int = 0
    adapter_received: int = 0
    adapter_stored: int = 0
    adapter_dropped: int = 0

    @classmethod
    def total(cls, parts: Iterable["Counters"]) -> "Counters":
        """Return the sum of several processes."""
        listed = list(parts)
        return cls(**{part.name: sum(getattr(counters, part.name) for counters in listed) for part in fields(cls)})

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return asdict(self)


#: The metrics of the counters: kind and help.
MEANING: dict[str, tuple[str, str]] = {
    "connected": ("gauge", "Open connections of nodes."),
    "connects": ("counter", "Opened connections."),
    "connect_errors": ("counter", "Attempts to connect that failed."),
    "disconnects": ("counter", "Connections that the server or the network ended."),
    "published": ("counter", "Registrations that a stream acknowledged; with an adapter, that nodes sent."),
    "published_bytes": ("counter", "Bytes of these registrations."),
    "retried": ("counter", "Registrations sent again, because they were refused or not acknowledged."),
    "dropped": ("counter", "Registrations that a node without a connection dropped."),
    "requests": ("counter", "Requests that nodes received."),
    "replies": ("counter", "Replies that nodes sent."),
    "adapter_received": ("counter", "Messages that the adapter received."),
    "adapter_stored": ("counter", "Messages of the adapter that a stream acknowledged."),
    "adapter_dropped": (
        "counter",
        "Messages that the adapter dropped: invalid, not acknowledged, or with a full queue.",
    ),
}
