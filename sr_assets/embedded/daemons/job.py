"""What a fleet of daemons does, what it has done so far, and the files, ports and memory that it needs."""

import math
import resource
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.embedded.choria_rpc import REGISTRATION_SUBJECT, agent_names, collective_names
from sr_assets.embedded.fleet_plan import FleetPlan

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
#: Files of a process besides its connections: libraries, the event loop, pipes.
_OTHER_FILES: Final = 64
_PROCESS_BYTES: Final = 90 << 20
#: Measured with 1,000 and 5,000 connections, rounded up; each agent of a collective is a subscription at the server alone.
_CONNECTION_BYTES: Final = 6 << 10
_TLS_BYTES: Final = 44 << 10
_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


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


def check_needs(job: Job) -> str:
    """Return a line about the needs of a fleet; raises RunError with the missing `ulimit` or the missing ports."""
    per_process = math.ceil(job.plan.nodes / job.processes)
    files = per_process + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = job.processes * _PROCESS_BYTES + job.plan.nodes * (_TLS_BYTES if job.cluster.tls else _CONNECTION_BYTES)
    needs = f"{files} open files in each of {job.processes} processes" if job.processes > 1 else f"{files} open files"
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    line = (
        f"{job.plan.nodes} nodes need {needs} (limit {limit}) and about {math.ceil(memory / (1 << 20))} MiB of memory; "
        f"the server needs {job.plan.nodes} open files"
    )
    if soft != resource.RLIM_INFINITY and files > soft:
        raise RunError(f"{line}; {_remedy(job, files, hard)}, or use --connections shared")
    _check_ports(job)
    return line


def _remedy(job: Job, files: int, hard: int) -> str:
    if hard == resource.RLIM_INFINITY or files <= hard:
        return f"run `ulimit -n {files}` first"
    enough = math.ceil(job.plan.nodes / max(1, hard - _OTHER_FILES))
    return f"raise the hard limit {hard} and run `ulimit -n {files}` first, use --processes {enough}"


def _check_ports(job: Job) -> None:
    """Raise RunError if this machine has too few local ports for the connections to a remote server."""
    hosts = {server.rpartition(":")[0] for server in job.cluster.servers}
    if any(host == "localhost" or host.startswith("127.") for host in hosts):
        return
    try:
        first, last = map(int, _PORTS.read_text().split())
    except (OSError, ValueError):
        return
    ports = (last - first + 1) * len(job.cluster.servers)
    if job.plan.nodes > ports:
        raise RunError(
            f"{job.plan.nodes} nodes need as many local ports, this machine has {ports} for {job.cluster.label}; widen "
            "net.ipv4.ip_local_port_range, name more servers in --url, or use several machines"
        )
