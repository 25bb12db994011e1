"""The proof that a site has no work at all, which lets `run --once` end without Dagster, Spark or an opened state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.refill_request import read_refill
from sr_assets.adapters.state.status_file import is_state_untouched, read_status, status_age_seconds
from sr_assets.automation.decisions import CAUGHT_UP
from sr_assets.automation.observing import find_work
from sr_assets.domain.errors import RunError
from sr_assets.settings import FeedSettings, StreamSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import Entry, Settings

#: Work that no message and no deadline announces, such as the retention of snapshots, waits no longer than this.
_LONGEST_SECONDS: Final = 3600.0


def is_idle(settings: Settings, site: str) -> bool:
    """Return whether a run of a site would change nothing.

    The last run was recent, had this configuration and no error, and left the state as it is. Since then no source has a new
    message and no node a passed deadline, each target is as that run left it, and no history waits to be refilled. A doubt, such
    as an unreachable server, is work.
    """
    entries, folder = settings.sites[site], settings.home / "sites" / site
    if any(entry.leader_election_name or entry.ephemeral for entry in entries):
        return False
    status = read_status(folder)
    age_seconds = status_age_seconds(status)
    if (
        age_seconds is None
        or age_seconds > _LONGEST_SECONDS
        or status.get("configuration") != settings.digest
        or lock_owner(folder) is not None
        or not is_state_untouched(folder)
        or any(read_refill(folder, entry) is not None for entry in entries if isinstance(entry, StreamSettings))
    ):
        return False
    eager = settings.model_copy(update={"sensor": settings.sensor.model_copy(update={"lag_messages": 1})})
    streams = [(entry, status["streams"].get(entry.stream, {})) for entry in entries]
    try:
        return (
            not any(
                row.get(problem)
                for _, row in streams
                for problem in ("last_error", "unpublished", "unpublished_events")
            )
            and find_work(eager, site) == CAUGHT_UP
            and all(_is_target_unchanged(entry, row) for entry, row in streams)
        )
    except RunError:
        return False


def _is_target_unchanged(entry: Entry, row: Mapping[str, Any]) -> bool:
    """Return whether a target still ends with the last copy; another writer's message there may hide a rollback."""
    if isinstance(entry, FeedSettings):
        return True
    created_ns, last_sequence = row["target"]
    with Cluster(entry.target, "sr-assets run") as cluster:
        target = cluster.find_stream(entry.target_stream)
    if target is None or not created_ns:
        return target is not None
    return (target.created_ns, target.last_sequence) == (created_ns, last_sequence)
