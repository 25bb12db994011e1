"""The batch loop of everything that folds a source into the site's state: tracked streams and feeds.

A step plans a range, reads it, and commits the folded rows with the new position in one transaction. Nothing outside the
state changes, so an interrupted batch is read again. Copying is another loop, because its batches change the target: they
need an intent and proof (`replication.replica`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from sr_assets.adapters import times
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import Progress
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.stream_tables import Counter, Gap, engine_counter
from sr_assets.domain.positions import SequenceRange, missing
from sr_assets.settings import Entry
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.holes import Hole, find_holes, gap_rows
from sr_assets.stages.source.position import load_position, note_read
from sr_assets.stages.source.source_reading import Ends, Reader, first_available, read_unless_changed, reading_end
from sr_assets.stages.source.suitability import check_source


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A range that was read: its rows in sequence order, its holes, and their rows for the table `gaps`.

    The source had lost the messages before `available` when the range was planned. `began` is in monotonic seconds. `engine`
    is the counter of the messages' engine.
    """

    covered: SequenceRange
    available: int
    rows: pa.Table
    holes: Sequence[Hole]
    gaps: list[Gap]
    began: float
    engine: Counter


class FoldStage(ABC):
    """The stage of one entry in one run that folds its messages; `unit` names the rows in the log."""

    def __init__(self, entry: Entry, site: Site, report: StreamReport, unit: str) -> None:
        self._entry, self._report = entry, report
        self._store, self._clusters, self._clock = site.state, site.clusters, site.clock
        self._reader = Reader(site.state, site.spark, site.files)
        self._progress = Progress(entry.label, unit)
        self._started = False
        #: Whether the last step reached the end of the source.
        self.caught_up = False

    def fold_next(self, ends: Ends) -> bool:
        """Read and fold the next batch; return whether there was work: a batch, or a changed source.

        Raises RunError or ConfigurationError.
        """
        entry, report = self._entry, self._report
        source = self._clusters.connect(entry.source).stream_info(entry.stream)
        self._clock.set(source.ts_ns)
        if not self._started:
            check_source(entry, source)
        state = load_position(self._store, self._clusters.connect(entry.source), entry, source)
        restarted = report.state is not None and report.state.starts != state.starts
        if not self._started or restarted:
            self._prepare(state, first=not self._started)
        self._started = True
        end = reading_end(ends, state, source, self._store.partitions(entry.stream).begins())
        covered = self._plan(state, source, end)
        self.caught_up = covered is None or covered.next > source.last_sequence
        if covered is None:
            return self._note_caught_up(state, source) or restarted
        reach(Point.PLANNED)
        began = times.monotonic()
        rows = read_unless_changed(
            self._clusters.connect(entry.source), source, lambda: self._read_present(source, covered)
        )
        if rows is None:
            return True
        reach(Point.READ)
        batch = self._batch(source, covered, rows, began)
        self._commit(state, source, batch)
        self._note_batch(state, source, batch)
        return True

    def _prepare(self, state: StreamState, *, first: bool) -> None:  # noqa: B027  a feed needs no preparation
        """Prepare the first batch of a run (`first`) or of a restarted source."""

    @abstractmethod
    def _plan(self, state: StreamState, source: StreamInfo, end: int) -> SequenceRange | None:
        """Return the next range, which ends before `end`, or None at the end of the source."""

    @abstractmethod
    def _read(self, source: StreamInfo, present: SequenceRange) -> pa.Table:
        """Return one row per message of a range that the source holds, in sequence order."""

    @abstractmethod
    def _no_rows(self) -> pa.Table:
        """Return the table of a range that the source has lost."""

    @abstractmethod
    def _commit(self, state: StreamState, source: StreamInfo, batch: ReadBatch) -> None:
        """Fold a batch and commit all its changes, with the new position, in one transaction."""

    @abstractmethod
    def _note_caught_up(self, state: StreamState, source: StreamInfo) -> bool:
        """Advance the watermark without a message; return whether that was work."""

    def _read_present(self, source: StreamInfo, covered: SequenceRange) -> pa.Table:
        present = SequenceRange(first_available(source, covered), covered.next)
        return self._read(source, present) if len(present) else self._no_rows()

    def _batch(self, source: StreamInfo, covered: SequenceRange, rows: pa.Table, began: float) -> ReadBatch:
        available = first_available(source, covered)
        absent = missing(SequenceRange(available, covered.next), rows["sequence"].to_pylist())
        holes = find_holes(self._entry, self._clusters.connect(self._entry.source), source, absent)
        gaps = gap_rows(self._entry, covered, available, holes, self._clock.now_ns())
        return ReadBatch(covered, available, rows, holes, gaps, began, engine_counter(in_spark=self._reader.in_spark))

    def _move_on(self, state: StreamState, batch: ReadBatch) -> None:
        """Move the position behind a batch."""
        state.next_sequence = batch.covered.next
        if batch.rows.num_rows:
            note_read(state, batch.rows["sequence"][-1].as_py(), batch.rows["stored_ns"][-1].as_py())

    def _note_batch(self, state: StreamState, source: StreamInfo, batch: ReadBatch) -> None:
        report, covered, seconds = self._report, batch.covered, times.monotonic() - batch.began
        report.first = covered.first if report.first is None else report.first
        report.next = covered.next
        report.batches += 1
        report.read_by[batch.engine] += batch.rows.num_rows
        report.gap_messages += sum(gap["messages"] for gap in batch.gaps if gap["reason"] != "filtered")
        report.state = state
        report.seconds += seconds
        left, count = max(0, source.last_sequence + 1 - covered.next), batch.rows.num_rows
        self._progress.note(
            covered, count, seconds, f"{left} left", caught_up=self.caught_up, done=len(covered), left=left
        )
