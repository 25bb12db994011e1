"""The decision about a whole site (`find_work`) from a tick's observations, and the proof that it has no work at all."""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.operator_settings import paused_entries
from sr_assets.adapters.state.orders import checkpoint_waits, read_refill
from sr_assets.adapters.state.status_file import (
    SiteStatus,
    StreamStatus,
    is_state_untouched,
    read_status,
    record_idle_poll,
)
from sr_assets.automation.decisions import (
    CAUGHT_UP,
    Decision,
    EntryRules,
    Observed,
    SourceNow,
    decide,
    unread_messages,
)
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import watermark
from sr_assets.domain.subjects import advisory_subject
from sr_assets.settings import ClusterSettings, Entry, FeedSettings, Settings, StreamSettings
from sr_assets.stages.clock import Clock

_SECOND_NS: Final = 1_000_000_000
#: Work that no message and no deadline announces, such as the retention of snapshots, waits no longer than this.
_LONGEST_SECONDS: Final = 3600.0


def _rules(entry: Entry) -> EntryRules:
    if isinstance(entry, FeedSettings):
        return EntryRules(starts_empty=False, deadline_passed="a heartbeat is overdue", pause_stops_reading=False)
    deadline_passed = "a node's deadline has passed"
    return EntryRules(starts_empty=True, deadline_passed=deadline_passed, pause_stops_reading=not entry.tracked)


class StreamInfoCache:
    """The last stream infos of each source cluster, at most `max_age_seconds` old; thread-safe.

    Each entry reads a response once; its next read queries the cluster again. So the ticks of one round of all sensors share
    one query.
    """

    def __init__(self, entries: Sequence[Entry], max_age_seconds: float) -> None:
        streams: dict[ClusterSettings, dict[str, None]] = defaultdict(dict)
        for entry in entries:
            streams[entry.source][entry.stream] = None
        self._clusters = {cluster: _Cluster(cluster, list(names)) for cluster, names in streams.items()}
        self._max_age_seconds = max_age_seconds

    def stream_info(self, entry: Entry, since: float) -> StreamInfo:
        """Return the info of an entry's source, queried at `since` (monotonic) or later.

        Raises RunError if the cluster does not respond or the stream does not exist.
        """
        since = max(since, times.monotonic() - self._max_age_seconds)
        return self._clusters[entry.source].read(entry, since)

    def recent(self, entry: Entry) -> StreamInfo:
        """Return the last info of an entry's source, even if the entry has read it; raises RunError as `stream_info` does."""
        since = times.monotonic() - self._max_age_seconds
        return self._clusters[entry.source].read(entry, since, again=True)


class _Cluster:
    """One cluster's stream infos, queried at `_queried_at` (monotonic), and the labels of the entries that have read them."""

    def __init__(self, settings: ClusterSettings, streams: Sequence[str]) -> None:
        self._settings, self._streams = settings, streams
        self._guard = threading.Lock()
        self._queried_at = -math.inf
        self._infos: dict[str, StreamInfo | RunError] = {}
        self._readers: set[str] = set()

    def read(self, entry: Entry, since: float, *, again: bool = False) -> StreamInfo:
        """Return the info of an entry's source, queried at `since` or later; `again`: the entry may have read it.

        Raises RunError as `StreamInfoCache.stream_info` does.
        """
        with self._guard:
            if not self._infos or self._queried_at < since or (entry.label in self._readers and not again):
                self._queried_at, self._readers = times.monotonic(), set()
                self._infos = self._query()
            self._readers.add(entry.label)
            info = self._infos[entry.stream]
        if isinstance(info, RunError):
            raise info
        return info

    def _query(self) -> dict[str, StreamInfo | RunError]:
        try:
            with Cluster(self._settings, "sr-assets sensors") as cluster:
                return cluster.stream_infos(self._streams)
        except RunError as error:
            return dict.fromkeys(self._streams, error)


def share_stream_infos(settings: Settings) -> StreamInfoCache:
    """Return the cache that the sensors of all sites share, so that a round queries each cluster once."""
    return StreamInfoCache(settings.entries, settings.sensor.interval_ns / _SECOND_NS / 2)


def find_work(settings: Settings, site: str, stream_infos: StreamInfoCache | None = None) -> Decision:
    """Decide whether a site needs a run; without `stream_infos`, query its sources for this site only.

    Raises RunError if no source responds or the list of paused streams is unreadable.
    """
    stream_infos = stream_infos or StreamInfoCache(settings.sites[site], math.inf)
    folder = settings.home / "sites" / site
    status = read_status(folder)
    if not status.exists and any(_rules(entry).starts_empty for entry in settings.sites[site]):
        return Decision("first run")
    if checkpoint_waits(settings, site):
        return Decision("a checkpoint is requested")
    if status.is_outdated:
        return Decision("the state was changed")
    # A deleted, damaged, moved or upgraded file.
    if status.exists and not is_published(settings.home, site):
        return Decision("fleet.duckdb lacks this site")
    paused = paused_entries(folder, settings.sites[site])
    with ExitStack() as connections:

        @functools.cache
        def connect(cluster: ClusterSettings) -> Cluster:
            return connections.enter_context(Cluster(cluster, f"sr-assets sensor {site}"))

        return _decide(_Tick(settings, site, status, paused, stream_infos, connect))


@dataclass(frozen=True, slots=True)
class _Tick:
    """What a tick of a site knows, and its connections, one per cluster."""

    settings: Settings
    site: str
    status: SiteStatus
    paused: frozenset[str]
    stream_infos: StreamInfoCache
    connect: Callable[[ClusterSettings], Cluster]


def _decide(tick: _Tick) -> Decision:
    """Check the entries of a site until one needs a run; raises RunError if no source responds."""
    notes, unreachable, is_idle = [], [], True
    entries = tick.settings.sites[tick.site]
    for entry in entries:
        try:
            reason, skip = _decide_entry(tick, entry)
        except RunError as error:
            unreachable.append(f"{entry.label}: {error}")
            continue
        if reason is not None:
            return Decision(f"{entry.label}: {reason}")
        if skip:
            notes.append(f"{entry.label}: {skip}")
            # A paused stream has no work, unlike a stream that waits after an error.
            is_idle &= entry.stream in tick.paused
    if len(unreachable) == len(entries):
        raise RunError("; ".join(unreachable))
    if is_idle and not unreachable:
        record_idle_poll(tick.settings.home / "sites" / tick.site)
    return Decision(None, "; ".join([*notes, *unreachable])) if notes or unreachable else CAUGHT_UP


def _decide_entry(tick: _Tick, entry: Entry) -> Decision:
    """Decide on one entry; raises RunError if its source does not respond."""
    observed = _observe(tick, entry)
    decision = decide(observed, tick.settings.sensor)
    if isinstance(entry, FeedSettings) or entry.advisory is None:
        return decision
    if decision.reason is not None or not observed.status.unpublished:
        return decision
    cluster = entry.source if entry.advisory.cluster == "source" else entry.target
    subject = advisory_subject(entry.advisory.subject, "new", "node")
    try:
        deliverable = bool(tick.connect(cluster).stream_names(subject))
    except RunError as error:
        return Decision(None, "; ".join(filter(None, [decision.skip, str(error)])))
    return decide(replace(observed, deliverable=deliverable), tick.settings.sensor)


def _observe(tick: _Tick, entry: Entry) -> Observed:
    age_seconds = tick.status.age_seconds
    # A response from before the status was written is older than the status.
    since = times.monotonic() - (math.inf if age_seconds is None else age_seconds)
    info = tick.stream_infos.stream_info(entry, since)
    status = tick.status.of(entry.stream)
    source = SourceNow(info.created_ns, info.first_sequence, info.last_sequence, _watermark(entry, status, info))
    if tick.settings.sensor.lag_ns and status.begun and unread_messages(status, source) > 0:
        unread_seconds = _unread_seconds(entry, status, info, tick.connect(entry.source))
        source = replace(source, unread_seconds=unread_seconds)
    return Observed(
        status,
        source,
        _rules(entry),
        paused=entry.stream in tick.paused,
        committed_at_ns=tick.status.committed_at_ns,
        age_seconds=age_seconds,
    )


def _unread_seconds(entry: Entry, status: StreamStatus, info: StreamInfo, cluster: Cluster) -> float | None:
    """Return how long the first unread message has waited, or None if there is none or the server sends no time."""
    unread = cluster.next_message(entry.stream, status.next_sequence, entry.filter_subject or ">")
    return None if unread is None or info.ts_ns is None else (info.ts_ns - unread.stored_ns) / 1e9


def _watermark(entry: Entry, status: StreamStatus, info: StreamInfo) -> int | None:
    """Return the watermark that a run would commit if it started now."""
    return watermark(
        info.ts_ns,
        None,
        replicas=info.replicas,
        warning_ns=entry.shortest_warning_ns,
        caught_up=info.last_sequence < status.next_sequence,
        mirror=info.mirror,
        previous_ns=status.watermark_ns,
        own_clock_ns=Clock.own_ns(),
    ).ns


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
    if (
        status.age_seconds is None
        or status.age_seconds > _LONGEST_SECONDS
        or status.configuration != settings.digest
        or lock_owner(folder) is not None
        or not is_state_untouched(folder)
        or any(read_refill(folder, entry) is not None for entry in entries if isinstance(entry, StreamSettings))
    ):
        return False
    eager = settings.model_copy(update={"sensor": settings.sensor.model_copy(update={"lag_messages": 1})})
    streams = [(entry, status.of(entry.stream)) for entry in entries]
    try:
        return (
            not any(row.last_error or row.unpublished or row.unpublished_events for _, row in streams)
            and find_work(eager, site) == CAUGHT_UP
            and all(_is_target_unchanged(entry, row) for entry, row in streams)
        )
    except RunError:
        return False


def _is_target_unchanged(entry: Entry, row: StreamStatus) -> bool:
    """Return whether a target still ends with the last copy; another writer's message there may hide a rollback."""
    if isinstance(entry, FeedSettings):
        return True
    with Cluster(entry.target, "sr-assets run") as cluster:
        target = cluster.find_stream(entry.target_stream)
    if target is None or row.target_sequence is None:
        return False
    ours = (row.target_created_ns, row.target_sequence)
    return not row.target_created_ns or (target.created_ns, target.last_sequence) == ours
