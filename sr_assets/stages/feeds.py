"""The centre: the advisory streams of all sites, folded into the site's global view, or followed message by message.

To follow, new messages are read as a sequence range, so that a lost connection or a recreated stream needs no repair; nothing
is written.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.arrow_rows import arrow_schema
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.range_rows import Advisories
from sr_assets.adapters.state.global_view import MAX_REJECTS
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.wire import Connection, read_confirmed
from sr_assets.domain.positions import SequenceRange, retention_begins_ns, retention_clock_ns
from sr_assets.domain.received import REPORTED, Advisory, Observation, SiteNotice, SitePaths, read_message
from sr_assets.domain.tracking.outages import SiteEvent
from sr_assets.settings import FeedSettings, Start
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.fold_stage import FoldStage, ReadBatch
from sr_assets.stages.source.position import advance, first_sequence
from sr_assets.stages.source.source_reading import next_range, save_gaps


class FeedStage(FoldStage):
    """The stage of one feed in one run."""

    def __init__(self, feed: FeedSettings, site: Site, report: StreamReport) -> None:
        super().__init__(feed, site, report, "advisories")
        self._feed = feed
        # All feeds share the quota of rejected messages.
        self._most_rejects = MAX_REJECTS // len(site.settings.feeds)

    def _plan(self, state: StreamState, source: StreamInfo, end: int) -> SequenceRange | None:
        return next_range(self._feed, state.next_sequence, source, end, self._clusters.connect(self._feed.source))

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

    def _read(self, source: StreamInfo, present: SequenceRange) -> pa.Table:
        return self._reader.read(self._feed, source, present, Advisories(tuple(self._feed.paths)))

    def _no_rows(self) -> pa.Table:
        return arrow_schema(Advisories().schema).empty_table()

    def _commit(self, state: StreamState, source: StreamInfo, batch: ReadBatch) -> None:
        """Commit a batch's advisories and heartbeats, and the new position, in one transaction."""
        store, report, feed = self._store, self._report, self._feed
        received = store.global_tables.limited(batch.rows, feed.max_streams, feed.max_nodes)
        nothing = pc.sum(pc.equal(received["kind"], "nothing")).as_py() or 0
        rejected = received.num_rows - received["reason"].null_count
        state.seen_messages += received.num_rows
        state.gap_messages += sum(gap["messages"] for gap in batch.gaps)
        self._move_on(state, batch)
        self._advance(state, source)
        state.as_of_ns = self._clock.now_ns()
        copying = store.load_copying(feed.stream)
        copying.copied_messages += received.num_rows - nothing
        copying.parked_messages += nothing
        with store.transaction():
            store.save_stream(state)
            store.save_copying(copying)
            save_gaps(store, feed, batch.gaps, report)
            store.counters(feed.stream).add({batch.engine: batch.rows.num_rows})
            self._fold(received, rejected)
        reach(Point.COMMITTED)
        report.copying = copying
        report.copied += received.num_rows - nothing
        report.parked += rejected
        for row in pc.value_counts(received["event_code"].drop_null()).to_pylist():
            report.events[REPORTED[row["values"]]] += row["counts"]

    def _advance(self, state: StreamState, source: StreamInfo) -> None:
        caught_up = source.last_sequence < state.next_sequence
        advance(state, source, warning_ns=None, caught_up=caught_up)

    def _fold(self, received: pa.Table, rejected: int) -> None:
        tables, name = self._store.global_tables, self._feed.stream
        tables.fold(name, received)
        for row in _reports(received):
            report = read_message(row["excerpt"].encode(), row["stored_ns"])
            if isinstance(report, Observation):
                tables.observe(name, report, row["stored_ns"])
            elif isinstance(report, SiteNotice) and report.event in tuple(SiteEvent):
                tables.note_outage(name, report)
        if rejected:
            tables.limit_rejects(name, self._most_rejects)

    def _note_caught_up(self, state: StreamState, source: StreamInfo) -> bool:
        """Advance the feed's clock without messages; return whether a site has become blind.

        A newly blind site is committed immediately, all else at the end of the run.
        """
        silence_ns = self._store.global_tables.next_silence(self._feed.stream, state.watermark_ns)
        self._advance(state, source)
        self._report.state = state
        if silence_ns is None or state.watermark_ns is None or silence_ns >= state.watermark_ns:
            return False
        with self._store.transaction():
            self._store.save_stream(state)
        return True


def _reports(received: pa.Table) -> list[dict[str, Any]]:
    """Return the heartbeats and site events among received rows: stored_ns, excerpt (the whole payload)."""
    chosen = pc.is_in(received["kind"], pa.array(["observation", "site_event"]))
    rows: list[dict[str, Any]] = received.filter(chosen).select(["stored_ns", "excerpt"]).to_pylist()
    return rows


@dataclass(slots=True)
class Follower:
    """A follower of one feed; `lookback_ns` is the start in ns before now, or None for now."""

    feed: FeedSettings
    lookback_ns: int | None = None
    _created_ns: int | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self._cluster = Cluster(self.feed.source, "sr-assets follow")

    def poll(self) -> list[tuple[Advisory, int]]:
        """Return the advisories stored since the last call, each with its stored time (unix ns). Raises RunError.

        A node's event that tells its state counts as an advisory, as in `global_advisories`.
        """
        source = self._cluster.stream_info(self.feed.stream)
        if source.created_ns != self._created_ns:
            self._next = self._begin(source)
            self._created_ns = source.created_ns
        fresh = SequenceRange(self._next, max(self._next, source.last_sequence + 1))
        if not len(fresh):
            return []
        paths = SitePaths(self.feed.paths)
        with Connection(self.feed.source, "sr-assets follow") as connection:
            lists = read_confirmed(
                connection,
                self.feed.stream,
                fresh,
                filter_subject=self.feed.filter_subject,
                direct=source.supports_batched_direct_get,
            )
            received = [(paths.told_state(message), message.stored_ns) for message in chain.from_iterable(lists)]
        self._next = fresh.next
        return [(advisory, stored_ns) for advisory, stored_ns in received if advisory is not None]

    def close(self) -> None:
        self._cluster.close()

    def _begin(self, source: StreamInfo) -> int:
        if self._created_ns is not None:
            return max(1, source.first_sequence)
        start = Start("end") if self.lookback_ns is None else Start("delta", self.lookback_ns)
        return first_sequence(self._cluster, start, source)
