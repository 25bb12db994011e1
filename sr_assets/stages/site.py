"""One run of a site: its lock, its open state, its connections, its Spark session, and the cycles of its stages.

Here: what all stages of a site share, in what order and how long they go round. Not here: what a stage does (`replica`,
`node_state`, `node_advisories`, `node_snapshots`), what Dagster is told about it (`assets`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from sr_assets.adapters.fleet import PublishedStream, publish_site, read_lineage
from sr_assets.adapters.jetstream import Cluster
from sr_assets.adapters.spark_engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark_source import write_connection
from sr_assets.adapters.state import SiteLock, SiteState, read_status, write_status
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from sr_assets.adapters.state import StreamState
    from sr_assets.settings import ClusterSettings, Settings, StreamSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
#: Publishing may take this share of a run's time, so its cost stays bounded however many nodes there are.
_PUBLISHING_SHARE = 0.1


class Stage(StrEnum):
    """What can be materialised of a stream, in the order of the flow."""

    REPLICA = "replica"
    NODE_SNAPSHOTS = "node_snapshots"
    NODE_STATE = "node_state"
    NODE_ADVISORIES = "node_advisories"


@dataclass(slots=True)
class StreamReport:
    """What a run did for one stream.

    `first` and `next` are the sequences it went through, `failure` one line or None.
    """

    stream: StreamSettings
    first: int | None = None
    next: int | None = None
    batches: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    copied_bytes: int = 0
    found: int = 0
    parked: int = 0
    gap_messages: int = 0
    disordered: int = 0
    swept: int = 0
    events: Counter[str] = field(default_factory=Counter)
    published: int = 0
    waiting: int = 0
    snapshots: int = 0
    lag_messages: int = 0
    undeliverable: str | None = None
    failure: str | None = None
    state: StreamState | None = None

    @property
    def messages(self) -> int:
        """How many source messages were read and decided."""
        return sum(self.reasons.values())


class Site:
    """The right to work on one site and everything needed for it, from `with` to its end.

    Raises SiteBusyError when another run holds the site for `wait_seconds` on. `folder` is `<home>/sites/<name>`. The
    Spark engine stays warm for `keep_engine_seconds` after its last use.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        owner: str,
        run_id: str,
        wait_seconds: float = 60.0,
        keep_engine_seconds: float = KEEP_SECONDS,
    ) -> None:
        """Name the site and who works on it."""
        self.settings = settings
        self.name = name
        self.streams = settings.sites[name]
        self.folder: Path = settings.home / "sites" / name
        self.run_id = run_id
        self._owner = owner
        self._wait_seconds = wait_seconds
        self._keep_engine_seconds = keep_engine_seconds
        self._stack = contextlib.ExitStack()
        self._clusters: dict[ClusterSettings, Cluster] = {}
        self._spark: SparkSession | None = None
        self._clock: tuple[int, float] | None = None
        self._publish_after = 0.0
        self._changed = False

    def __enter__(self) -> Self:
        """Take the lock and open the state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(SiteLock(self.folder, self._owner, self._wait_seconds))
            self.state = stack.enter_context(SiteState(self.folder))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections and the state, free the lock."""
        self._stack.close()

    def cluster(self, settings: ClusterSettings) -> Cluster:
        """Return the open connection to a cluster; one for each in a run."""
        if settings not in self._clusters:
            self._clusters[settings] = self._stack.enter_context(Cluster(settings, f"sr-assets {self.name}"))
        return self._clusters[settings]

    def connection_file(self, settings: ClusterSettings) -> str:
        """Return the path of the file that tells Spark's tasks how to reach a cluster."""
        clusters = list(dict.fromkeys(one for stream in self.streams for one in (stream.source, stream.target)))
        file = self.folder / "connections" / f"{clusters.index(settings)}.json"
        return str(write_connection(file, settings).resolve())

    def spark(self) -> SparkSession:
        """Return this site's Spark session; the first call of a run joins it."""
        if self._spark is None:
            self._stack.enter_context(use_engine(self.settings.home, self._keep_engine_seconds))
            from sr_assets.adapters.spark_session import leave_session, open_session

            self._spark = open_session(self.settings.spark, self.settings.home.resolve(), self.name)
            self._stack.callback(leave_session, self._spark)
        return self._spark

    def set_clock(self, ts_ns: int | None) -> None:
        """Take a server's clock as the time of what is noted from now on: our own is never written down."""
        if ts_ns is not None:
            self._clock = (ts_ns, time.monotonic())

    def now_ns(self) -> int:
        """Return the servers' time, as far as this run knows it."""
        if self._clock is None:
            return time.time_ns()
        ts_ns, at = self._clock
        return ts_ns + int((time.monotonic() - at) * 1e9)

    def changed(self) -> None:
        """Note that something was committed that is not published yet."""
        self._changed = True

    def publish(self, *, now: bool = True) -> None:
        """Publish what was committed.

        With `now` false only if something was and publishing does not take too large a share of the time.
        """
        if not now and (not self._changed or time.monotonic() < self._publish_after):
            return
        started = time.monotonic()
        streams = [PublishedStream(one.stream, one.target_stream, one.tracked) for one in self.streams]
        lineage = publish_site(
            self.settings.home,
            self.name,
            self.state,
            streams,
            sites=list(self.settings.sites),
            run_id=self.run_id,
            as_of_ns=self.now_ns(),
        )
        self._changed = False
        self._publish_after = time.monotonic() + (time.monotonic() - started) / _PUBLISHING_SHARE
        self.write_status(lineage)

    def write_status(self, lineage: str | None = None) -> None:
        """Write what the sensor and the command line go by."""
        states = {stream.stream: self.state.load_stream(stream.stream) for stream in self.streams}
        shown = (
            "created_ns",
            "next_sequence",
            "watermark_ns",
            "source_last_sequence",
            "lag_messages",
            "last_error",
            "last_error_since_ns",
        )
        streams: dict[str, Any] = {
            stream: {
                **{key: getattr(state, key) for key in shown},
                "next_deadline_ns": self.state.next_deadline(stream),
                "unpublished": self.state.outbox_size(stream),
            }
            for stream, state in states.items()
            if state is not None
        }
        lineage = lineage or read_status(self.folder).get("lineage")
        write_status(
            self.folder, {"site": self.name, "streams": streams, "lineage": lineage, "committed_at_ns": self.now_ns()}
        )


def run_site(site: Site, selection: Mapping[str, frozenset[Stage]], *, drain_only: bool) -> dict[str, StreamReport]:
    """Go round the chosen stages of a site's streams until they are level; returns a report by stream.

    Then the run lingers: it looks at the sources every second and takes what comes, until nothing came for `linger` or
    `run_budget` is used up. With `drain_only` it stops where the sources were when it began. A stream that fails is
    left out from then on; the others go on. What was committed is published in any case, and a failed stream says why
    in its report and in `replication.last_error`.
    """
    streams = [stream for stream in site.streams if stream.stream in selection]
    reports = {stream.stream: StreamReport(stream) for stream in streams}
    began = active = time.monotonic()
    budget_seconds, linger_seconds = site.settings.run_budget_ns / 1e9, site.settings.linger_ns / 1e9
    ends: dict[str, int] = {}
    try:
        while True:
            busy = False
            for stream in streams:
                report = reports[stream.stream]
                if report.failure is None:
                    busy |= _go_round(site, stream, selection[stream.stream], report, ends if drain_only else None)
            site.publish(now=False)
            now = time.monotonic()
            if busy:
                active = now
            if all(report.failure for report in reports.values()) or (not drain_only and now - began > budget_seconds):
                break
            if not busy and (drain_only or now - active > linger_seconds):
                break
            if not busy:
                time.sleep(_POLL_SECONDS)
    finally:
        _note_end(site, reports)
        site.publish()
    return reports


def _go_round(
    site: Site, stream: StreamSettings, stages: frozenset[Stage], report: StreamReport, ends: dict[str, int] | None
) -> bool:
    """Run a stream's stages once; returns whether there was anything to do. What fails is noted in the report."""
    from sr_assets.stages import node_advisories, node_snapshots, node_state, replica

    busy = False
    try:
        if Stage.REPLICA in stages:
            busy = replica.copy_batch(site, stream, report, ends)
        if Stage.NODE_SNAPSHOTS in stages:
            busy |= node_snapshots.adopt(site, stream, report)
        if Stage.NODE_STATE in stages:
            busy |= node_state.sweep_due(site, stream, report)
        if Stage.NODE_ADVISORIES in stages:
            busy |= node_advisories.publish_outbox(site, stream, report)
    except SrAssetsError as error:
        report.failure = f"{stream.label}: {error}"
        logger.error("%s", report.failure)  # noqa: TRY400 - one line for the user; the trace says nothing more
    return busy


def _note_end(site: Site, reports: Mapping[str, StreamReport]) -> None:
    """Write down how the run ended for each stream."""
    for name, report in reports.items():
        state = site.state.load_stream(name)
        if state is None:
            continue
        if report.failure is None:
            state.last_error = state.last_error_since_ns = None
        elif state.last_error is None:
            state.last_error, state.last_error_since_ns = report.failure, site.now_ns()
        else:
            state.last_error = report.failure
        if report.state is not None:
            state.watermark_ns, state.planned_ns = report.state.watermark_ns, report.state.planned_ns
            state.source_last_sequence = report.state.source_last_sequence
            state.lag_messages, state.lag_ns = report.state.lag_messages, report.state.lag_ns
        state.as_of_ns = site.now_ns()
        retention_ns = report.stream.retired_retention_ns
        with site.state.transaction():
            site.state.save_stream(state)
            if retention_ns is not None and state.watermark_ns is not None:
                site.state.drop_retired(name, state.watermark_ns - retention_ns)
        report.state = state
        report.waiting = site.state.outbox_size(name)


def needs_publishing(home: Path, folder: Path) -> bool:
    """Tell whether the published file lacks a site's rows: it was deleted, or made from nothing, since."""
    status = read_status(folder)
    return bool(status) and status.get("lineage") != read_lineage(home)
