"""Stage `node_snapshots`: staged Parquet moves into the history, with an index of the newest message per node."""

import shutil
from pathlib import Path

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.compaction import describe, is_abandoned
from sr_assets.adapters.published.history import (
    drop_rows,
    file_mark,
    file_range,
    history_files,
    place_staged,
    stream_folder,
)
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import StreamSettings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.tracking.history_compaction import HistoryCompaction


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
            listed = {self._home / file.file for file in self._index.files()}
            replaced = {self._home / name for name in self._index.replaced()}
            self._later = [
                file
                for file in history_files(self.folder)
                if file_range(file)[1] > batches[0][0]
                and file not in replaced
                and (file in listed or not is_abandoned(file, listed))
            ]
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
