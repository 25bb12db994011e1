"""Stage `advisory_feed`: one batch after the other of an advisory stream, folded into the site's global view.

A batch is read, then everything it changes, the position with it, is one transaction: there is nothing outside to mend
after a crash, so there is no intent; the same range is read again. Not here: the rules (`domain.availability`), the
fold's statements (`adapters.state.global_view`), where a stream begins and what a source made again means (`position`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.spark.source import advisory_schema
from sr_assets.adapters.state.global_view import MAX_REJECTS
from sr_assets.domain.availability import LIFE_CYCLE, Observation, read_message
from sr_assets.domain.positions import SequenceRange, missing
from sr_assets.stages.replication.target import check_source
from sr_assets.stages.source.position import advance, load_position
from sr_assets.stages.source.reading import gap_rows, next_range, read_with_spark

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import StreamInfo
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import FeedSettings
    from sr_assets.stages.site import Site, StreamReport

logger = logging.getLogger(__name__)


def fold_feed(site: Site, feed: FeedSettings, report: StreamReport, ends: dict[str, int] | None) -> bool:
    """Fold the next batch of a feed; returns whether there was anything to do.

    `ends` is as in `replica.copy_batch`. Raises RunError or ConfigurationError with one line.
    """
    source = site.cluster(feed.source).stream_info(feed.stream)
    site.set_clock(source.ts_ns)
    if report.state is None:
        check_source(feed, source)
        report.reached = True
    end = source.last_sequence if ends is None else ends.setdefault(feed.stream, source.last_sequence)
    state = load_position(site, feed, source)
    covered = next_range(feed, state, source, end)
    if covered is None:
        return _note_silence(site, feed, state, source, report)
    started = time.monotonic()
    told = _read(site, feed, source, covered)
    reach(Point.READ)
    _commit(site, feed, state, source, covered, told, report)
    report.seconds += time.monotonic() - started
    left = max(0, source.last_sequence + 1 - covered.next)
    logger.info("%s: [%d, %d) %d advisories, %d left", feed.label, covered.first, covered.next, told.num_rows, left)
    return True


def forget_old(site: Site, feed: FeedSettings) -> None:
    """Drop what the retention does not keep, by the feed's own clock; inside a transaction."""
    state = site.state.load_stream(feed.stream)
    if state is not None and state.watermark_ns is not None:
        oldest_ns = state.watermark_ns - site.settings.advisories_retention_ns
        site.state.global_tables.forget_before(feed.stream, oldest_ns)


def _read(site: Site, feed: FeedSettings, source: StreamInfo, covered: SequenceRange) -> pa.Table:
    present = SequenceRange(_available(source, covered), covered.next)
    if not len(present):
        return advisory_schema().empty_table()
    return read_with_spark(site, feed, source, present, advisories="true")


def _available(source: StreamInfo, covered: SequenceRange) -> int:
    """Return the first sequence of a range that the source still holds."""
    return min(max(covered.first, source.first_sequence), covered.next)


def _commit(
    site: Site,
    feed: FeedSettings,
    state: StreamState,
    source: StreamInfo,
    covered: SequenceRange,
    told: pa.Table,
    report: StreamReport,
) -> None:
    """Commit what a batch told, and the position behind it, in one transaction."""
    available = _available(source, covered)
    absent = missing(SequenceRange(available, covered.next), told["sequence"].to_pylist())
    gaps = gap_rows(site, feed, source, covered, available, absent)
    nothing = pc.sum(pc.equal(told["kind"], "nothing")).as_py() or 0
    apart = told.num_rows - told["reason"].null_count
    state.next_sequence = covered.next
    state.seen_messages += told.num_rows
    state.copied_messages += told.num_rows - nothing
    state.parked_messages += nothing
    state.gap_messages += sum(gap["messages"] for gap in gaps)
    if told.num_rows:
        state.last_stored_ns = max(told["stored_ns"][-1].as_py(), state.last_stored_ns or 0)
    advance(feed, state, source, level=covered.next > source.last_sequence)
    state.as_of_ns = site.now_ns()
    tables = site.state.global_tables
    with site.state.transaction():
        site.state.save_stream(state)
        if gaps:
            site.state.add_rows("gaps", pa.Table.from_pylist(gaps))
        tables.fold(feed.stream, told)
        for row in told.filter(pc.equal(told["kind"], "observation")).select(["stored_ns", "excerpt"]).to_pylist():
            said = read_message(row["excerpt"].encode(), row["stored_ns"])
            assert isinstance(said, Observation)
            tables.observe(feed.stream, said, row["stored_ns"])
        if apart:
            tables.limit_rejects(feed.stream, MAX_REJECTS // len(site.settings.feeds))
    reach(Point.COMMITTED)
    site.changed()
    report.state, report.lag_messages = state, state.lag_messages
    report.first = covered.first if report.first is None else report.first
    report.next = covered.next
    report.batches += 1
    report.copied += told.num_rows - nothing
    report.parked += apart
    report.gap_messages += sum(gap["messages"] for gap in gaps if gap["reason"] != "filtered")
    for row in pc.value_counts(told["event_code"].drop_null()).to_pylist():
        report.events[LIFE_CYCLE[row["values"]].value] += row["counts"]


def _note_silence(site: Site, feed: FeedSettings, state: StreamState, source: StreamInfo, report: StreamReport) -> bool:
    """Nothing to fold: time has passed all the same, and a site may have been silent for too long since.

    That is committed at once, and everything else with the end of the run. Returns whether a site has fallen silent.
    """
    silence_ns = site.state.global_tables.next_silence(feed.stream, state.watermark_ns)
    advance(feed, state, source, level=source.last_sequence < state.next_sequence)
    report.state, report.lag_messages = state, state.lag_messages
    if silence_ns is None or state.watermark_ns is None or silence_ns >= state.watermark_ns:
        return False
    with site.state.transaction():
        site.state.save_stream(state)
    site.changed()
    return True
