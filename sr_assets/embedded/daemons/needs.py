"""The open files, ports and memory that a fleet needs, and what this machine lacks."""

import math
import resource
from pathlib import Path
from typing import Final

from sr_assets.domain.errors import RunError
from sr_assets.embedded.daemons.job import Job

#: Files of a process besides its connections: libraries, the event loop, pipes.
_OTHER_FILES: Final = 64
_PROCESS_BYTES: Final = 90 << 20
#: Measured with 1,000 and 5,000 connections, rounded up; each agent of a collective is a subscription at the server alone.
_CONNECTION_BYTES: Final = 6 << 10
_TLS_BYTES: Final = 44 << 10
_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
