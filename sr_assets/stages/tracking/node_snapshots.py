"""Stage `node_snapshots`: bring the newest-per-node table up to the staged Parquet; compaction and retention of days.

Not here: what is staged (`spark.sink`), the view that shows it (`adapters.published`).
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.history import compact_day, place_staged, remove_before, remove_covered, stream_folder
from sr_assets.domain.positions import DAY_NS, SequenceRange

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport

#: An open day is compacted too once it has this many files: a view over thousands of them is slow to open.
_MANY_FILES = 200


def staging_folder(site_folder: Path, stream: StreamSettings, covered: SequenceRange, mark: str) -> Path:
    """Return where a batch's writers put their Parquet files; `mark` is the `source_mark` of the source."""
    return site_folder.resolve() / "staging" / stream.asset_prefix[1] / f"{covered.first}-{covered.next}{mark}"


class SnapshotStage:
    """The stage of one tracked stream, for the time of a run."""

    def __init__(
        self,
        stream: StreamSettings,
        store: SiteState,
        home: Path,
        site_folder: Path,
        retention_ns: int | None,
        report: StreamReport,
    ) -> None:
        """Take what the stage uses; `retention_ns` is how long history is kept, None without limit."""
        self._stream, self._store, self._index = stream, store, store.snapshot_index(stream.stream)
        self._site_folder, self._retention_ns, self._report = site_folder, retention_ns, report
        self._folder = stream_folder(home.resolve(), stream.name, stream.stream)

    def index_staged(self) -> bool:
        """Move staged files into the history and index the nodes' newest messages; returns whether there were any."""
        batches = self._index.staged()
        for first, after, mark in batches:
            covered = SequenceRange(first, after)
            staging = staging_folder(self._site_folder, self._stream, covered, mark)
            files = place_staged(staging, self._folder, covered, mark)
            reach(Point.PLACING_SNAPSHOTS)
            with self._store.transaction():
                self._index.add(first, after, files, mark)
            self._report.snapshots += 1
        return bool(batches)

    @property
    def has_history(self) -> bool:
        """Whether there are files of the history, or staged ones."""
        return self._folder.exists() or bool(self._index.staged())

    def compact(self, now_ns: int) -> None:
        """Compact closed days, delete days beyond the retention and what no batch knows; once a run.

        Files that were compacted go with the next run: until this one has published, a reader's view still names them.
        """
        # Those of a stream that is tracked no more have not been moved.
        self.index_staged()
        today = datetime.fromtimestamp(now_ns / 1e9, UTC).date()
        if self._retention_ns is not None:
            self._remove_before((today - timedelta(days=max(1, self._retention_ns // DAY_NS))).isoformat())
        for day in sorted(self._folder.glob("date=*")):
            remove_covered(day)
            closed = day.name.removeprefix("date=") < today.isoformat()
            if closed or sum(1 for _ in day.glob("*.parquet")) >= _MANY_FILES:
                for whole, parts in compact_day(day).items():
                    with self._store.transaction():
                        self._index.move(parts, whole)
        self._remove_orphans()

    def _remove_before(self, oldest: str) -> None:
        lost = [file for file in self._index.files() if file.rpartition("date=")[2][:10] < oldest]
        if lost:
            with self._store.transaction():
                self._index.forget(lost)
        remove_before(self._folder, oldest)

    def _remove_orphans(self) -> None:
        known = {f"{first}-{after}{mark}" for first, after, mark in self._index.staged()}
        intent = self._store.open_intent(self._stream.stream)
        under_way = f"{intent.first}-{intent.next}" if intent else "none"
        for folder in (self._site_folder / "staging" / self._stream.asset_prefix[1]).glob("*-*"):
            if folder.name not in known and not f"{folder.name}-".startswith(f"{under_way}-"):
                shutil.rmtree(folder, ignore_errors=True)
