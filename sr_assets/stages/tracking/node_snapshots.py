"""Stage `node_snapshots`: staged Parquet moves into the history, which is indexed by node and compacted."""

import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.history_paths import history_path, relative_name
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.compaction import describe, hold_rows, is_abandoned, merge, merged_first, unread_files
from sr_assets.adapters.published.history import (
    drop_rows,
    file_mark,
    file_range,
    history_files,
    place_staged,
    remove_before,
    source_mark,
    stream_folder,
)
from sr_assets.adapters.state.orders import read_refill
from sr_assets.adapters.state.snapshot_index import IndexedFile
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.history_layout import HOUR_NS, HistoryFile, Merge, plan_merges
from sr_assets.domain.positions import DAY_NS, SequenceRange, retention_clock_ns
from sr_assets.settings import StreamSettings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site

logger = logging.getLogger(__name__)

#: Maximum number of days that a run compacts into one file each.
_DAYS_AT_ONCE: Final = 5
#: Larger merges wait for the end of the run, because copying waits for a merge.
_ROWS_DURING_RUN: Final = 200_000
_HOURS: Final = DAY_NS // HOUR_NS


class HistoryCompaction:
    """The compaction of one stream's history in one run. Only one thread at a time may use it."""

    def __init__(self, stream: StreamSettings, store: SiteState, site: Site) -> None:
        self._stream, self._store, self._index = stream, store, store.snapshot_index(stream.stream)
        self._site, self._home = site, site.settings.home.resolve()
        self._folder = stream_folder(self._home, stream.name, stream.stream)
        self._retention_ns = site.settings.snapshots.retention_ns
        self._adopted = False

    def compact(self, now_ns: int) -> None:
        """Do the due merges, and delete expired days. `now_ns`: every message before it is known."""
        self.adopt_unknown()
        remove_replaced(self._site, self._store, self._stream.stream)
        if oldest := self.oldest_date(now_ns):
            self._remove_before(oldest)
        planned = list(self._plan(now_ns, days=_DAYS_AT_ONCE))
        done, files = 0, sum(len(merge.parts) for merge in planned)
        with LongWork(f"{self._stream.label}: compacting history files", files) as progress:
            for merge in planned:
                self._merge(merge, logging.INFO)
                done += len(merge.parts)
                progress.reached(done)

    def compact_small(self) -> None:
        """Do the due merges that take a few seconds at most, during a run."""
        self.adopt_unknown()
        remove_replaced(self._site, self._store, self._stream.stream)
        # Before the queue is read: the copies of all messages until then are in it.
        state = self._store.load_stream(self._stream.stream)
        now_ns = retention_clock_ns(state.watermark_ns, self._site.clock.own_ns()) if state else None
        for planned in self._plan(now_ns, days=0) if now_ns is not None else ():
            if planned.rows <= _ROWS_DURING_RUN:
                self._merge(planned, logging.DEBUG)

    def _plan(self, now_ns: int, days: int) -> Iterator[Merge]:
        """Yield the due merges, newest day first; at most `days` of the days that are over."""
        settled_hour = self._settled_hour(now_ns)
        by_day: dict[str, list[IndexedFile]] = defaultdict(list)
        for file in self._index.files():
            by_day[Path(file.file).parent.name].append(file)
        for day, files in sorted(by_day.items(), reverse=True):
            # Most days are one file already.
            if len(files) == 1 and files[0].level:
                continue
            over = _first_hour(day) + _HOURS <= settled_hour
            if not over or days > 0:
                merges = list(plan_merges(self._described(files), settled_hour, over=over, ending=days > 0))
                days -= bool(over and merges)
                yield from merges

    def _settled_hour(self, now_ns: int) -> int:
        """Return the hour since 1970 before which no more rows are expected; `now_ns` must be older than the state."""
        name = self._stream.stream
        if read_refill(self._site.folder, self._stream) is not None:
            return 0
        hour = now_ns // HOUR_NS
        if self._store.copy_queue(name).size() or self._store.open_intent(name) or self._index.staged():
            # A copy that waits is about as old as the newest row, or newer.
            return min(hour, max((file.last_hour or 0 for file in self._index.files()), default=0))
        return hour

    def _described(self, files: list[IndexedFile]) -> list[HistoryFile]:
        """Return the files with paths; read and index what an earlier build did not know."""
        described = []
        for file in files:
            path = self._home / file.file
            if file.rows is None or file.first_hour is None or file.last_hour is None:
                if not path.exists():
                    continue
                whole = describe(path)._replace(level=file.level)
                with self._store.transaction():
                    self._index.list_files([whole])
                described.append(whole)
                continue
            hours = file.first_hour, file.last_hour
            described.append(HistoryFile(path, file_range(path)[0], file_mark(path), file.level, file.rows, *hours))
        return described

    def _merge(self, planned: Merge, level: int) -> None:
        paths = [part.path for part in planned.parts]
        if missing := [path for path in paths if not path.exists()]:
            # Deleted files: their rows are lost, and their nodes' newest messages.
            with self._store.transaction():
                self._index.forget(list(map(relative_name, missing)))
            return
        started = times.monotonic()
        merged = merge(planned, self._site.folder / "compaction" / self._stream.asset_prefix[1])
        with self._store.transaction():
            self._index.move(paths, merged)
        reach(Point.REPLACED_HISTORY)
        seconds, rows = times.monotonic() - started, sum(file.rows for file in merged)
        logger.log(
            level,
            "%s: compacted %d history files into %d of %d rows in %.1f s",
            *(self._stream.label, len(paths), len(merged), rows, seconds),
        )

    def oldest_date(self, now_ns: int) -> str | None:
        """Return the first date (ISO) that retention keeps, or None without retention."""
        if self._retention_ns is None:
            return None
        today = datetime.fromtimestamp(now_ns / 1e9, UTC).date()
        return (today - timedelta(days=max(1, self._retention_ns // DAY_NS))).isoformat()

    def _remove_before(self, oldest: str) -> None:
        lost = [file.file for file in self._index.files() if file.file.rpartition("date=")[2][:10] < oldest]
        if lost:
            with self._store.transaction():
                self._index.forget(lost)
        remove_before(self._folder, oldest)

    def adopt_unknown(self) -> None:
        """Index the files of a lost state, once per run, and forget files that were deleted.

        Files of an interrupted merge are deleted. Of files with the same rows, the merged ones count.
        """
        if self._adopted:
            return
        self._adopted = True
        for draft in self._folder.glob("date=*/.[0-9]*-[0-9]*.parquet"):
            draft.unlink()
        accepted, missing, unknown = self.survey()
        if missing:
            with self._store.transaction():
                self._index.forget(list(map(relative_name, missing)))
        for file in merged_first(unknown):
            if is_abandoned(file.path, accepted):
                file.path.unlink()
                continue
            self._adopt(file, accepted)
            accepted.add(file.path)

    def survey(self) -> tuple[set[Path], set[Path], set[Path]]:
        """Return three sets of files: in the index and the folder, only in the index, only in the folder.

        Replaced files, which wait for their deletion, are in none.
        """
        present = set(history_files(self._folder))
        listed = {self._home / file.file for file in self._index.files()}
        replaced = {self._home / name for name in self._index.replaced()}
        missing = listed - present
        # An index with missing files may be of an older state: a later file may have the name of one that it had replaced.
        return listed & present, missing, present - listed - (set() if missing else replaced)

    def _adopt(self, file: HistoryFile, accepted: set[Path]) -> None:
        """Index one file; `accepted` are the others, without lower levels that are unknown too."""
        state = self._store.load_stream(self._stream.stream)
        present = state is not None and source_mark(state.created_ns, state.reset_starts) == file.mark
        with self._store.transaction():
            if hold_rows(accepted, file.path):
                # A part that waits for its deletion.
                self._index.list_files([file])
                self._index.move([file.path], [])
                return
            if present:
                self._index.add_earlier([file])
            else:
                self._index.list_files([file])
            if parts := [other for other in accepted if hold_rows([file.path], other)]:
                self._index.move(parts, [file])


def remove_replaced(site: Site, store: SiteState, stream: str) -> None:
    """Delete merged files of a stream's history once no reader needs them."""
    index, home = store.snapshot_index(stream), site.settings.home.resolve()
    if (replaced := index.replaced()) and (unread := unread_files(home, site.name, replaced)):
        for name in unread:
            try:
                history_path(home, site.name, stream, name).unlink(missing_ok=True)
            except ValueError as error:
                # The row is forgotten, and the file stays.
                logger.warning("%s/%s: a replaced file was not deleted: %s", site.name, stream, error)
        with store.transaction():
            index.forget(unread)


def _first_hour(day: str) -> int:
    """Return the first hour of a folder `date=…`, counted since 1970."""
    date = datetime.fromisoformat(day.removeprefix("date=")).replace(tzinfo=UTC)
    return int(date.timestamp()) // 3_600


def staging_folder(site_folder: Path, stream: StreamSettings, covered: SequenceRange, mark: str) -> Path:
    """Return the staging folder of a batch's writers; `mark` is the `source_mark` of the source."""
    return site_folder.resolve() / "staging" / stream.asset_prefix[1] / f"{covered.first}-{covered.next}{mark}"


class SnapshotStage:
    """The stage of one tracked stream in one run."""

    def __init__(self, stream: StreamSettings, store: SiteState, site: Site, report: StreamReport) -> None:
        self._stream, self._store, self._index = stream, store, store.snapshot_index(stream.stream)
        self._site_folder, self._report = site.folder, report
        #: The folder of the stream's history.
        self._home = site.settings.home.resolve()
        self.folder = stream_folder(self._home, stream.name, stream.stream)
        self.compaction = HistoryCompaction(stream, store, site)
        # Files of a later state, if this one is an older one: they hold some rows already.
        self._later: list[Path] | None = None

    def index_staged(self) -> bool:
        """Move staged files into the history and index the nodes' newest messages; return whether there were any."""
        batches = self._index.staged()
        # An empty list stays empty: this run's files end before its next batch.
        if batches and self._later != []:
            self.compaction.adopt_unknown()
            listed = [self._home / file.file for file in self._index.files()]
            self._later = [file for file in listed if file_range(file)[1] > batches[0][0]]
        for first, after, mark in batches:
            covered = SequenceRange(first, after)
            staging = staging_folder(self._site_folder, self._stream, covered, mark)
            files = place_staged(staging, self.folder, covered, mark)
            reach(Point.PLACING_SNAPSHOTS)
            if others := [file for file in self._later or () if file not in files and _overlaps(file, covered, mark)]:
                files = [*drop_rows(files, others), *others]
            with self._store.transaction():
                self._index.add(first, after, [*map(describe, files)], mark)
            self._report.snapshots += 1
        return bool(batches)

    @property
    def has_history(self) -> bool:
        """Whether the history or staged files exist."""
        return self.folder.exists() or bool(self._index.staged())

    def compact(self, now_ns: int) -> None:
        """Compact files, and delete expired days and orphaned staged files; once per run.

        `now_ns`: every message before it is known. Files that were merged stay until no reader's view names them.
        """
        # The staged files of a stream that is no longer tracked have not been moved.
        self.index_staged()
        self.compaction.compact(now_ns)
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        known = {f"{first}-{after}{mark}" for first, after, mark in self._index.staged()}
        intent = self._store.open_intent(self._stream.stream)
        batch_active = f"{intent.first}-{intent.next}" if intent else "none"
        for folder in (self._site_folder / "staging" / self._stream.asset_prefix[1]).glob("*-*"):
            if folder.name not in known and not f"{folder.name}-".startswith(f"{batch_active}-"):
                shutil.rmtree(folder, ignore_errors=True)


def _overlaps(file: Path, covered: SequenceRange, mark: str) -> bool:
    first, after = file_range(file)
    return first < covered.next and after > covered.first and file_mark(file) == mark
