"""`leader.json`: this member's role in the election of a site, and the deadline of its leadership.

The process that campaigns for the site writes it; runs, tasks of this machine, sensors and metrics read it. The deadline
is a time of CLOCK_BOOTTIME, which all processes of a machine share and which also advances while the machine sleeps.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.private import write_private
from sr_assets.domain.errors import LeadershipLostError
from sr_assets.domain.positions import format_rfc3339_ns

_FILE: Final = "leader.json"
#: Raises LeadershipLostError unless this member leads now.
Guard = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Lease:
    """The result of this member's last campaign for a site.

    `leader` is None if no leader is known, and `problem` says why; campaigns have failed since `failing_since` (unix
    seconds). `leader_host` is None for a Stream Replicator.
    `since_ns` is the begin of the leader's term (unix ns). This member leads before `deadline`, and does not campaign
    before `rests_until` (both `boot_seconds`). `campaigns` counts by state, for metrics; `keys` maps each key to the
    member's name. `locks` names the lock of a lease that is not a leadership.
    """

    leader: str | None = None
    leader_host: str | None = None
    since_ns: int | None = None
    problem: str | None = None
    failing_since: float | None = None
    deadline: float = 0.0
    rests_until: float = 0.0
    ttl_seconds: float = 0.0
    interval_seconds: float = 0.0
    campaigns: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    locks: str = ""

    @property
    def holds(self) -> bool:
        """Whether this member leads now."""
        return times.boot_seconds() < self.deadline

    @property
    def line(self) -> str:
        """Return `MEMBER on HOST leads since T`, also of the holder of a lock, or why no leader is known."""
        if self.leader is None:
            return self.problem or "no leader is known yet"
        host = f" on {self.leader_host}" if self.leader_host else ""
        since = f" since {format_rfc3339_ns(self.since_ns)[:19]}Z" if self.since_ns else ""
        return f"{self.leader}{host} {f'holds {self.locks}' if self.locks else 'leads'}{since}"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the lease of a site's folder; an empty one if there is none of this boot."""
        try:
            fields: dict[str, Any] = json.loads((folder / _FILE).read_text())
            return cls(**fields["lease"]) if fields["boot"] == times.boot_id() else cls()
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Replace the lease of a site's folder."""
        # A lease means nothing after a restart of the machine, and a slow disk must not delay a renewal.
        lease = json.dumps({"boot": times.boot_id(), "pid": os.getpid(), "lease": asdict(self)})
        write_private(folder / _FILE, lease, durable=False)


def forget_lease(folder: Path) -> None:
    """Delete the lease of a site that has no election, or on a full disk."""
    (folder / _FILE).unlink(missing_ok=True)


def lease_age_seconds(folder: Path) -> float | None:
    """Return how long ago the lease of a site's folder was written, or None if there is none."""
    try:
        return times.time() - (folder / _FILE).stat().st_mtime
    except OSError:
        return None


def guard_of(folder: Path) -> Guard:
    """Return the guard of a site's folder: it raises LeadershipLostError unless the site's lease holds."""

    def ensure() -> None:
        lease = Lease.read(folder)
        if not lease.holds:
            # The campaign of a process that was suspended has not found the new holder yet.
            reason = "not renewed in time" if lease.deadline else lease.line
            if lease.locks:
                raise LeadershipLostError(
                    f"{folder.parent.name}: the run lost its lock ({reason}) and stops before its next commit; the next run"
                    " continues"
                )
            raise LeadershipLostError(
                f"{folder.name}: this member no longer leads ({reason}); it stops, and the next leader continues"
            )

    return ensure


def instance_of(folder: Path) -> str:
    """Return the id of a site's folder on this machine since its boot: a copy of the home elsewhere has another."""
    folder.mkdir(parents=True, exist_ok=True)
    status = folder.stat()
    text = f"{times.boot_id()} {socket.gethostname()} {os.path.realpath(folder)} {status.st_dev} {status.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]
