"""Stage `advisory_feed`: folding an advisory stream into the site's global view, in batches.

One transaction commits a batch's changes with the position. The fold has no effect outside the state, so it needs no
intent: after a crash the same range is read again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.spark.schemas import arrow_schema
from sr_assets.adapters.spark.source import ADVISORY_SCHEMA
from sr_assets.adapters.state.global_view import MAX_REJECTS
from sr_assets.domain.positions import SequenceRange, missing, retention_begins_ns, retention_clock_ns
from sr_assets.domain.received import LIFE_CYCLE, Observation, read_message
from sr_assets.stages.progress import Progress
from sr_assets.stages.source.position import advance, load_position, note_read
from sr_assets.stages.source.reading import (
    first_available,
    gap_rows,
    next_range,
    read_unless_changed,
    reading_end,
    save_gaps,
)
from sr_assets.stages.source.suitability import check_source

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import FeedSettings
    from sr_assets.stages.clock import Clock
    from sr_assets.stages.connections import Clusters
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.source.reading import Ends, Reader


class FeedStage:
    """The stage of one feed in one run."""

    def __init__(
        self,
        feed: FeedSettings,
        store: SiteState,
        clusters: Clusters,
        reader: Reader,
        clock: Clock,
        report: StreamReport,
        *,
        most_feeds: int,
    ) -> None:
        """Store the stage's resources; `most_feeds` feeds share the quota of rejected messages."""
        self._feed, self._store, self._clusters, self._reader = feed, store, clusters, reader
        self._clock, self._report = clock, report
        self._most_rejects = MAX_REJECTS // most_feeds
        self._progress = Progress(feed.label, "advisories")
        #: Whether the last step reached the end of the stream.
        self.caught_up = False

    def fold_next(self, ends: Ends) -> bool:
        """Fold the next batch of the feed; return whether there was work. Raises RunError or ConfigurationError."""
        feed, report = self._feed, self._report
        cluster = self._clusters.connect(feed.source)
        source = cluster.stream_info(feed.stream)
        self._clock.set(source.ts_ns)
        if report.state is None:
            check_source(feed, source)
        state = load_position(self._store, cluster, feed, source)
        covered = next_range(feed, state.next_sequence, source, reading_end(ends, state, source), cluster)
        self.caught_up = covered is None or covered.next > source.last_sequence
        if covered is None:
            return self._note_silence(state, source)
        started = time.monotonic()
        received = read_unless_changed(cluster, source, lambda: self._read(source, covered))
        if received is None:
            return True
        reach(Point.READ)
        self._commit(state, source, covered, received)
        seconds = time.monotonic() - started
        report.seconds += seconds
        left = max(0, source.last_sequence + 1 - covered.next)
        self._progress.note(
            covered,
            received.num_rows,
            seconds,
            f"{left} left",
            caught_up=self.caught_up,
            done=len(covered),
            left=left,
        )
        return True

    def forget_old(self, state: StreamState, retention_ns: int) -> None:
        """Delete expired rows by the feed's own clock, inside the caller's transaction.

        `retention_ns` applies to advisories; retired nodes follow the feed's `retired_retention`.
        """
        tables, feed = self._store.global_tables, self._feed
        now_ns = retention_clock_ns(state.watermark_ns, self._clock.own_ns())
        if now_ns is None:
            return
        tables.forget_before(feed.stream, retention_begins_ns(now_ns, retention_ns))
        if feed.retired_retention_ns is not None:
            tables.forget_retired(feed.stream, retention_begins_ns(now_ns, feed.retired_retention_ns))

    def _read(self, source: StreamInfo, covered: SequenceRange) -> pa.Table:
        present = SequenceRange(first_available(source, covered), covered.next)
        if not len(present):
            return arrow_schema(ADVISORY_SCHEMA).empty_table()
        return self._reader.read(self._feed, source, present, advisories="true")

    def _commit(self, state: StreamState, source: StreamInfo, covered: SequenceRange, received: pa.Table) -> None:
        """Commit a batch's advisories and heartbeats, and the new position, in one transaction."""
        store, report, feed = self._store, self._report, self._feed
        available = first_available(source, covered)
        absent = missing(SequenceRange(available, covered.next), received["sequence"].to_pylist())
        gaps = gap_rows(feed, source, covered, available, absent, self._clock.now_ns())
        nothing = pc.sum(pc.equal(received["kind"], "nothing")).as_py() or 0
        rejected = received.num_rows - received["reason"].null_count
        state.next_sequence = covered.next
        state.seen_messages += received.num_rows
        state.gap_messages += sum(gap["messages"] for gap in gaps)
        if received.num_rows:
            note_read(state, received["sequence"][-1].as_py(), received["stored_ns"][-1].as_py())
        self._advance(state, source)
        state.as_of_ns = self._clock.now_ns()
        copying = store.load_copying(feed.stream)
        copying.copied_messages += received.num_rows - nothing
        copying.parked_messages += nothing
        with store.transaction():
            store.save_stream(state)
            store.save_copying(copying)
            save_gaps(store, feed, gaps, report)
            self._fold(received, rejected)
        reach(Point.COMMITTED)
        report.state, report.copying, report.lag_messages = state, copying, state.lag_messages
        report.first = covered.first if report.first is None else report.first
        report.next = covered.next
        report.batches += 1
        report.copied += received.num_rows - nothing
        report.parked += rejected
        report.gap_messages += sum(gap["messages"] for gap in gaps if gap["reason"] != "filtered")
        for row in pc.value_counts(received["event_code"].drop_null()).to_pylist():
            report.events[LIFE_CYCLE[row["values"]].value] += row["counts"]

    def _advance(self, state: StreamState, source: StreamInfo) -> None:
        caught_up = source.last_sequence < state.next_sequence
        advance(state, source, warning_ns=None, caught_up=caught_up, own_clock_ns=self._clock.own_ns())

    def _fold(self, received: pa.Table, rejected: int) -> None:
        tables, name = self._store.global_tables, self._feed.stream
        tables.fold(name, received)
        for row in _observations(received):
            observation = read_message(row["excerpt"].encode(), row["stored_ns"])
            assert isinstance(observation, Observation)
            tables.observe(name, observation, row["stored_ns"])
        if rejected:
            tables.limit_rejects(name, self._most_rejects)

    def _note_silence(self, state: StreamState, source: StreamInfo) -> bool:
        """Advance the feed's clock without messages; return whether a site has become blind.

        A newly blind site is committed immediately, all else at the end of the run.
        """
        silence_ns = self._store.global_tables.next_silence(self._feed.stream, state.watermark_ns)
        self._advance(state, source)
        self._report.state, self._report.lag_messages = state, state.lag_messages
        if silence_ns is None or state.watermark_ns is None or silence_ns >= state.watermark_ns:
            return False
        with self._store.transaction():
            self._store.save_stream(state)
        return True


def _observations(received: pa.Table) -> list[dict[str, Any]]:
    """Return the heartbeats among received rows: stored_ns, excerpt (the whole payload)."""
    rows: list[dict[str, Any]] = (
        received.filter(pc.equal(received["kind"], "observation")).select(["stored_ns", "excerpt"]).to_pylist()
    )
    return rows
