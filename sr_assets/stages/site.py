"""A site at work: its lock, its open state, its connections, its Spark session, and what a run says it did.

Here: what all stages of a site share. Not here: their order and their cycles (`run`), what each of them does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from sr_assets.adapters.connection_file import write_connection
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.published.publishing import PublishedStream, publish_site, read_generation
from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.state.store import SiteLock, SiteState, read_status, status_age_seconds, write_status
from sr_assets.settings import FeedSettings, StreamSettings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import ClusterSettings, Entry, Settings

logger = logging.getLogger(__name__)

#: Publishing may take this share of a run's time, so its cost stays bounded however many nodes there are.
_PUBLISHING_SHARE = 0.1
#: How long a run that always finds more publishes nothing at first.
_BUSY_SECONDS = 5.0


class Stage(StrEnum):
    """What can be materialised of a stream, in the order of the flow; of a feed `advisory_feed` alone."""

    REPLICA = "replica"
    NODE_SNAPSHOTS = "node_snapshots"
    NODE_STATE = "node_state"
    NODE_ADVISORIES = "node_advisories"
    ADVISORY_FEED = "advisory_feed"


@dataclass(slots=True)
class StreamReport:
    """What a run did for one stream or feed.

    `first` and `next` are the sequences it went through, `failure` one line or None. `reached`: source and target have
    both answered. `trouble` is what is tried again at `retry_at` (monotonic seconds), for the `retries`-th time in a row.
    Of a feed `copied` counts what was folded, `parked` what is kept apart. `alive_at` is when the stream last said that it
    watches, `began_at` when the run began (monotonic seconds); `alive_ns` and `alive_due_ns` are as in the state.
    """

    stream: Entry
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
    resent: int = 0
    swept: int = 0
    events: Counter[str] = field(default_factory=Counter)
    published: int = 0
    waiting: int = 0
    snapshots: int = 0
    lag_messages: int = 0
    began_at: float = field(default_factory=time.monotonic)
    alive_at: float | None = None
    alive_ns: int | None = None
    alive_due_ns: int | None = None
    undeliverable: str | None = None
    reached: bool = False
    retries: int = 0
    trouble: str | None = None
    retry_at: float = 0.0
    failure: str | None = None
    misconfigured: bool = False
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
        self.entries = settings.sites[name]
        self.streams = tuple(entry for entry in self.entries if isinstance(entry, StreamSettings))
        self.feeds = tuple(entry for entry in self.entries if isinstance(entry, FeedSettings))
        self.folder: Path = settings.home / "sites" / name
        self.run_id = run_id
        self._owner = owner
        self._wait_seconds = wait_seconds
        self._keep_engine_seconds = keep_engine_seconds
        self._stack = contextlib.ExitStack()
        self._clusters: dict[ClusterSettings, Cluster] = {}
        self._connections = contextlib.ExitStack()
        self._spark: SparkSession | None = None
        self._clock: tuple[int, float] | None = None
        self._began_at = time.monotonic()
        self._publish_after = 0.0
        self._changed = False

    def __enter__(self) -> Self:
        """Take the lock and open the state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(SiteLock(self.folder, self._owner, self._wait_seconds))
            self.state = stack.enter_context(SiteState(self.folder))
            stack.callback(self.disconnect)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the connections and the state, free the lock; an exception, a cancellation say, stops the engine's work."""
        if kind is not None and self._spark is not None:
            from sr_assets.adapters.spark.session import stop_work

            stop_work(self._spark)
        self._stack.close()

    def cluster(self, settings: ClusterSettings) -> Cluster:
        """Return the open connection to a cluster; one for each in a run."""
        if settings not in self._clusters:
            self._clusters[settings] = self._connections.enter_context(Cluster(settings, f"sr-assets {self.name}"))
        return self._clusters[settings]

    def disconnect(self) -> None:
        """Close the connections to the clusters and to Spark; the next use of one makes it anew."""
        self._clusters.clear()
        self._spark = None
        self._connections.close()

    def connection_file(self, settings: ClusterSettings) -> str:
        """Return the path of the file that tells Spark's tasks how to reach a cluster."""
        ends = [one for stream in self.streams for one in (stream.source, stream.target)]
        clusters = list(dict.fromkeys([*ends, *(feed.source for feed in self.feeds)]))
        file = self.folder / "connections" / f"{clusters.index(settings)}.json"
        return str(write_connection(file, settings).resolve())

    def spark(self) -> SparkSession:
        """Return this site's Spark session; the first call of a run joins it."""
        if self._spark is None:
            from sr_assets.adapters.spark.session import leave_session, open_session

            self._spark = open_session(self.settings.spark, self.settings.home.resolve(), self.name)
            self._connections.callback(leave_session, self._spark)
            self._connections.enter_context(use_engine(self.settings.home, self._keep_engine_seconds))
        return self._spark

    def set_clock(self, ts_ns: int | None) -> None:
        """Take a server's clock as the time of what is noted from now on: our own is never written down."""
        if ts_ns is not None:
            self._clock = (ts_ns, time.monotonic())

    def now_ns(self) -> int:
        """Return the servers' time, as far as this run knows it: as long as none answered, by what the last run knew."""
        if self._clock is None:
            status = read_status(self.folder)
            age_seconds = status_age_seconds(status)
            if age_seconds is None:
                return time.time_ns()
            self._clock = (status["committed_at_ns"], time.monotonic() - age_seconds)
        ts_ns, at = self._clock
        return ts_ns + int((time.monotonic() - at) * 1e9)

    def changed(self) -> None:
        """Note that something was committed that is not published yet."""
        self._changed = True

    def publish(self, *, now: bool = True, level: bool = True) -> None:
        """Publish what was committed.

        With `now` false only if something was and publishing does not take too large a share of the time. A run that is
        not level yet has first to go on for a while: one that is level soon publishes once, however many nodes there are.
        """
        after = self._publish_after or (0.0 if level else self._began_at + _BUSY_SECONDS)
        if not now and (not self._changed or time.monotonic() < after):
            return
        started = time.monotonic()
        streams = [PublishedStream(one.stream, one.target_stream, one.tracked) for one in self.streams]
        streams += [PublishedStream(feed.stream, None, feed.tracked) for feed in self.feeds]
        generation = publish_site(
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
        self.write_status(generation)

    def write_status(self, generation: str | None = None) -> None:
        """Write what the sensor and the command line go by."""
        states = {entry.stream: self.state.load_stream(entry.stream) for entry in self.entries}
        feeds = {feed.stream for feed in self.feeds}
        shown = (
            "created_ns",
            "next_sequence",
            "seen_messages",
            "watermark_ns",
            "source_last_sequence",
            "lag_messages",
            "last_error",
            "last_error_since_ns",
        )
        streams: dict[str, Any] = {
            stream: {
                **{key: getattr(state, key) for key in shown},
                "next_deadline_ns": (
                    self.state.global_tables.next_silence(stream, state.watermark_ns)
                    if stream in feeds
                    else self.state.next_deadline(stream)
                ),
                "unpublished": self.state.outbox_size(stream),
            }
            for stream, state in states.items()
            if state is not None
        }
        generation = generation or read_status(self.folder).get("generation")
        write_status(
            self.folder,
            {"site": self.name, "streams": streams, "generation": generation, "committed_at_ns": self.now_ns()},
        )


def needs_publishing(home: Path, folder: Path) -> bool:
    """Tell whether the published file lacks a site's rows: it was deleted, or made from nothing, since."""
    status = read_status(folder)
    return bool(status) and status.get("generation") != read_generation(home)
