"""Stage `node_snapshots`: indexing staged Parquet for the newest message per node; compaction and retention."""

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.compaction import Merge, is_abandoned, merge, plan_merges
from sr_assets.adapters.published.history import (
    drop_rows,
    file_mark,
    file_range,
    place_staged,
    remove_before,
    stream_folder,
)
from sr_assets.adapters.state.snapshot_index import relative_name
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.positions import DAY_NS, SequenceRange
from sr_assets.settings import StreamSettings
from sr_assets.stages.progress import LongWork
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site

logger = logging.getLogger(__name__)

#: A day is complete when nothing was written to it for this long: delayed copies may belong to yesterday.
_QUIET_NS: Final = 3_600 * 1_000_000_000
#: Maximum number of days that a run compacts into one file each.
_DAYS_AT_ONCE: Final = 5


def staging_folder(site_folder: Path, stream: StreamSettings, covered: SequenceRange, mark: str) -> Path:
    """Return the staging folder of a batch's writers; `mark` is the `source_mark` of the source."""
    return site_folder.resolve() / "staging" / stream.asset_prefix[1] / f"{covered.first}-{covered.next}{mark}"


class SnapshotStage:
    """The stage of one tracked stream in one run."""

    def __init__(self, stream: StreamSettings, store: SiteState, site: Site, report: StreamReport) -> None:
        self._stream, self._store, self._index = stream, store, store.snapshot_index(stream.stream)
        self._site_folder, self._retention_ns = site.folder, site.settings.snapshots.retention_ns
        self._home, self._report = site.settings.home.resolve(), report
        #: The folder of the stream's history.
        self.folder = stream_folder(self._home, stream.name, stream.stream)
        # Files of a later state, if this one is an older one: they hold some rows already.
        self._later: list[Path] | None = None

    def index_staged(self) -> bool:
        """Move staged files into the history and index the nodes' newest messages; return whether there were any."""
        batches = self._index.staged()
        if batches and self._later is None:
            present = self.folder.glob("date=*/[0-9]*.parquet")
            self._later = [file for file in present if file_range(file)[1] > batches[0][0]]
        for first, after, mark in batches:
            covered = SequenceRange(first, after)
            staging = staging_folder(self._site_folder, self._stream, covered, mark)
            files = place_staged(staging, self.folder, covered, mark)
            reach(Point.PLACING_SNAPSHOTS)
            if others := [file for file in self._later or () if file not in files and _overlaps(file, covered, mark)]:
                files = [*drop_rows(files, others), *others]
            with self._store.transaction():
                self._index.add(first, after, files, mark)
            self._report.snapshots += 1
        return bool(batches)

    @property
    def has_history(self) -> bool:
        """Whether the history or staged files exist."""
        return self.folder.exists() or bool(self._index.staged())

    def compact(self, now_ns: int) -> None:
        """Compact files, delete expired days and unknown files; once per run.

        Compacted files are deleted by the next run: until this one has published, a reader's view still names them.
        """
        # The staged files of a stream that is no longer tracked have not been moved.
        self.index_staged()
        self._remove_replaced()
        self._list_unknown()
        today = datetime.fromtimestamp(now_ns / 1e9, UTC).date()
        if oldest := self.oldest_date(now_ns):
            self._remove_before(oldest)
        days: dict[Path, dict[Path, int]] = defaultdict(dict)
        for name, level in self._index.levels().items():
            file = self._home / name
            days[file.parent][file] = level
        left = _DAYS_AT_ONCE
        planned: list[Merge] = []
        for day, levels in sorted(days.items(), reverse=True):
            over = left > 0 and day.name.removeprefix("date=") < today.isoformat() and _is_quiet(levels, now_ns)
            merges = list(plan_merges(levels, over=over))
            left -= bool(over and merges)
            planned += merges
        done, files = 0, sum(len(merge.parts) for merge in planned)
        with LongWork(f"{self._stream.label}: compacting history files", files) as progress:
            for merge in planned:
                self._merge(merge)
                done += len(merge.parts)
                progress.reached(done)
        self._remove_orphans()

    def _merge(self, planned: Merge) -> None:
        parts = [part for part in planned.parts if part.exists()]
        if len(parts) < len(planned.parts):
            # Deleted files: their rows are lost, and their nodes' newest messages.
            with self._store.transaction():
                self._index.forget([relative_name(part) for part in planned.parts if part not in parts])
            return
        started = time.monotonic()
        rows = merge(planned, self._site_folder / "compaction" / self._stream.asset_prefix[1])
        with self._store.transaction():
            self._index.move(planned.parts, planned.whole, planned.level)
        seconds = time.monotonic() - started
        label, count = self._stream.label, len(planned.parts)
        logger.info("%s: compacted %d history files into one of %d rows in %.1f s", label, count, rows, seconds)

    def _remove_replaced(self) -> None:
        gone = self._index.replaced()
        for name in gone:
            (self._home / name).unlink(missing_ok=True)
        if gone:
            with self._store.transaction():
                self._index.forget(gone)

    def oldest_date(self, now_ns: int) -> str | None:
        """Return the first date (ISO) that retention keeps, or None without retention."""
        if self._retention_ns is None:
            return None
        today = datetime.fromtimestamp(now_ns / 1e9, UTC).date()
        return (today - timedelta(days=max(1, self._retention_ns // DAY_NS))).isoformat()

    def unknown_files(self) -> list[Path]:
        """Return the files of a lost state, which the index does not list; delete those of an interrupted compaction."""
        levels = {self._home / name: level for name, level in self._index.levels().items()}
        unknown = [file for file in self.folder.glob("date=*/[0-9]*.parquet") if file not in levels]
        abandoned = [file for file in unknown if is_abandoned(file, levels)]
        for file in abandoned:
            file.unlink()
        return [file for file in unknown if file not in abandoned]

    def _list_unknown(self) -> None:
        """Index files of a lost state."""
        if kept := self.unknown_files():
            with self._store.transaction():
                self._index.list_files(kept, level=0)

    def _remove_before(self, oldest: str) -> None:
        lost = [file for file in self._index.levels() if file.rpartition("date=")[2][:10] < oldest]
        if lost:
            with self._store.transaction():
                self._index.forget(lost)
        remove_before(self.folder, oldest)

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


def _is_quiet(files: Iterable[Path], now_ns: int) -> bool:
    """Return whether none of some files was written recently."""
    return all(not file.exists() or now_ns - file.stat().st_mtime_ns > _QUIET_NS for file in files)
