"""A site during a run: its lock, state, clock, connections and polls, and the publication of committed work."""

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from sr_assets.adapters import control, times
from sr_assets.adapters.home import kept_sites, open_home
from sr_assets.adapters.logs import note_run
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.manifest import LOCK_SECONDS, FleetBusyError
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.published.tables import TOPOLOGY_SITE
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection, SparkProvider
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.operator_settings import paused_entries
from sr_assets.adapters.state.schema import EVENT_TABLES
from sr_assets.adapters.state.status_file import (
    SiteStatus,
    StreamStatus,
    note_closed_state,
    read_status,
    write_status,
)
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import RunError
from sr_assets.domain.sizing import poll_seconds
from sr_assets.settings import Entry, FeedSettings, Settings, StreamSettings
from sr_assets.stages.checkpointing import Checkpoints, restore_newer
from sr_assets.stages.clock import Clock
from sr_assets.stages.connections import Clusters, ConnectionFiles
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.locks import Locks

#: The folder in a site's for found copies that exceed the memory; a killed process may leave content.
SPILLED: Final = "found"
#: Publishing may use this share of a core, so that its cost stays bounded with any number of nodes.
_PUBLISHING_SHARE: Final = 0.06
#: Minimum interval between a run's publications, so that folding and copying share one.
_PUBLISHED_SECONDS: Final = 1.0
#: Minimum interval between publications of sightings and copies alone, which are thus queryable within 5 s: with a few
#: messages per second, half of the CPU time of a poll is the publication's.
_SIGHTINGS_SECONDS: Final = 4.8
#: How long a run that has not caught up waits before its first publication.
_BUSY_SECONDS: Final = 5.0
#: How long a commit waits for active copies, so that one publication shows both.
_COPYING_SECONDS: Final = 1.0
_ROUND_WAIT_SECONDS: Final = 0.5


class Pace:
    """The polls of one site; `linger_seconds` are the run's.

    The interval follows the cost of a poll: the CPU time of the process since the poll before, divided by its sites.
    """

    def __init__(self, linger_seconds: float) -> None:
        self._linger_seconds = linger_seconds
        #: The number of sites that the process serves.
        self.sites_served: Callable[[], int] = lambda: 1
        self._cost_seconds = 0.0
        self._used_seconds = time.process_time()
        #: When an entry that has caught up is polled again (monotonic seconds).
        self.next_poll_at = 0.0

    def begin_round(self) -> None:
        """Set the time of the next poll if the last one is over; call it before the entries take their steps."""
        now, used_seconds, sites = times.monotonic(), time.process_time(), self.sites_served()
        if now < self.next_poll_at:
            return
        if self.next_poll_at:
            # The mean with the polls before: one that catches up costs more, and says little of the next.
            self._cost_seconds = (self._cost_seconds + (used_seconds - self._used_seconds) / sites) / 2
        self._used_seconds = used_seconds
        self.next_poll_at = now + poll_seconds(self._cost_seconds, self._linger_seconds, sites)


class Site:
    """The right to work on one site, with all resources for the work; a context manager.

    Raises SiteBusyError if another run holds the site for longer than `wait_seconds`, and StandbyError if another member
    leads it; without leadership nothing is committed or sent. `folder` is
    `<home>/sites/<name>`. `spark` is the engine, by default the home's.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        owner: str,
        run_id: str,
        wait_seconds: float = 60.0,
        spark: SparkProvider | None = None,
    ) -> None:
        self.settings = settings
        self.name = name
        self.entries = settings.sites[name]
        self.streams = tuple(entry for entry in self.entries if isinstance(entry, StreamSettings))
        self.feeds = tuple(entry for entry in self.entries if isinstance(entry, FeedSettings))
        self.folder: Path = settings.home / "sites" / name
        self.run_id = run_id
        self.clock = Clock(self.folder)
        self.leadership = Leadership(settings, name)
        self._locks = Locks(settings, name, run_id)
        self.clusters = Clusters(name, self.leadership)
        reachable = [cluster for entry in self.entries for cluster in entry.clusters]
        self.files = ConnectionFiles(self.folder, reachable)
        engine = spark or HomeEngine(settings.spark, settings.home.resolve())
        self.spark = SparkConnection(engine, settings.spark.from_messages, name)
        self.pace = Pace(settings.linger_ns / 1e9)
        #: Set when background work ends.
        self.woken = threading.Event()
        self._lock = SiteLock(self.folder, owner, wait_seconds)
        self._stack = contextlib.ExitStack()
        self._began_at = times.monotonic()
        self._publish_after = self._publish_sightings_after = 0.0
        self._changed = self._has_events = False
        self._changed_at = 0.0
        self._refused: frozenset[str] = frozenset()
        self._shown_paused: frozenset[str] = frozenset()

    def __enter__(self) -> Self:
        """Take the lock and open the state."""
        open_home(self.settings.home, self.settings.published_mode)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(self.leadership).require()
            control.end_upgrade(self.folder)
            shutil.rmtree(self.folder / SPILLED, ignore_errors=True)
            self.leadership.locks = stack.enter_context(self._locks).acquired()
            stack.callback(self.files.remove)
            restore_newer(self.settings, self.name)
            streams = read_status(self.folder).streams
            self._shown_paused = frozenset(stream for stream, status in streams.items() if status.paused)
            stack.callback(note_closed_state, self.folder)
            self.state = stack.enter_context(
                SiteState(self.folder, self._note_change, self.leadership.ensure, self.clock.servers_ns)
            )
            stack.enter_context(Checkpoints(self.settings, self.name, self.state, self.leadership))
            stack.callback(self.spark.close)
            stack.callback(self.clusters.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close connections and state, and release the lock; on an exception, interrupt the engine's tasks."""
        if kind is not None:
            self.spark.interrupt()
        self._stack.close()

    def _note_change(self, tables: set[str]) -> None:
        self._has_events |= not EVENT_TABLES.isdisjoint(tables)
        if not self._changed:
            self._changed, self._changed_at = True, times.monotonic()

    def note_paused(self) -> None:
        """Publish a stream that was paused or resumed as if work on it had been committed."""
        if self._paused() != self._shown_paused and not self._has_events:
            self._changed = self._has_events = True
            self._changed_at = times.monotonic()

    def note_refused(self, stream: str, *, refused: bool) -> None:
        """Note for the sensor whether a stream's advisories are refused."""
        self._refused = self._refused | {stream} if refused else self._refused - {stream}

    def publish(self, *, now: bool = True, caught_up: bool = True, copying: bool = False) -> None:
        """Publish committed work.

        Unless `now`, publish only after a commit, and if publishing does not exceed its share of time. Sightings and copies
        alone wait longer than events. A run that has not caught up delays its first publication: if it soon catches up,
        it publishes once. While it is `copying`, a commit waits for a second.
        """
        if not now and times.monotonic() < self.publishing_due_at(caught_up=caught_up, copying=copying):
            return
        # CPU time of this thread, because waiting for a core on a busy machine is no cost, and the process may serve
        # other sites.
        started = time.thread_time()
        # During a run, do not wait for another site's publication: new rows wait for the next one.
        wait_seconds = LOCK_SECONDS if now else _ROUND_WAIT_SECONDS
        self._changed = self._has_events = False
        paused = self._paused()
        try:
            statuses = publish_site(
                self.settings.home,
                self.name,
                self.state,
                published_streams(self.entries, paused),
                sites=published_sites(self.settings),
                run=Run(self.clock.now_ns(), self.run_id),
                mode=self.settings.published_mode,
                wait_seconds=wait_seconds,
            )
        except FleetBusyError:
            if now:
                raise
            self._changed = self._has_events = True
            self._publish_after = times.monotonic() + _BUSY_SECONDS
            return
        used_seconds = time.thread_time() - started
        self._publish_after = times.monotonic() + max(_PUBLISHED_SECONDS, used_seconds / _PUBLISHING_SHARE)
        self._publish_sightings_after = times.monotonic() + _SIGHTINGS_SECONDS
        self._shown_paused = paused
        self._write_status(statuses)

    def publishing_due_at(self, *, caught_up: bool, copying: bool) -> float:
        """Return when `publish` is due again (monotonic seconds); infinity without new commits."""
        if not self._changed:
            return math.inf
        after = self._publish_after or (0.0 if caught_up else self._began_at + _BUSY_SECONDS)
        if not self._has_events:
            after = max(after, self._publish_sightings_after)
        return max(after, self._changed_at + _COPYING_SECONDS if copying else 0.0)

    def _paused(self) -> frozenset[str]:
        """Return the paused streams; an error fails the copying, not the publishing."""
        try:
            return paused_entries(self.folder, self.entries)
        except RunError:
            return frozenset()

    def _write_status(self, statuses: Mapping[str, StreamStatus]) -> None:
        """Store the status for the sensor and the command line, with what the publication showed."""
        before = read_status(self.folder)
        streams = {
            stream: replace(
                status,
                last_success_ns=before.of(stream).last_success_ns if status.last_error else Clock.own_ns(),
                refused_since_ns=self.state.outbox(stream).waiting_since_ns() if stream in self._refused else None,
            )
            for stream, status in statuses.items()
            if stream in {entry.stream for entry in self.entries}
        }
        write_status(self.folder, SiteStatus(streams, self.settings.digest, self.clock.now_ns()))


def published_streams(entries: Iterable[Entry], paused: Collection[str]) -> list[PublishedStream]:
    """Return the streams and feeds of a site for its publication."""
    return [
        PublishedStream(entry.stream, entry.target_stream, entry.tracked, entry.stream in paused)
        if isinstance(entry, StreamSettings)
        else PublishedStream(entry.stream, None, entry.tracked, is_feed=True)
        for entry in entries
    ]


def published_sites(settings: Settings) -> list[str]:
    """Return the names of the shown publications: the kept sites, and the native streams if configured."""
    return [*kept_sites(settings), *([TOPOLOGY_SITE] if settings.topology else [])]


def site_of_run(settings: Settings, name: str, run_id: str, spark: SparkProvider) -> Site:
    """Return the site for a Dagster run, which later JSON log lines about the site name."""
    note_run(name, run_id)
    return Site(settings, name, owner=f"run {run_id}", run_id=run_id, spark=spark)
