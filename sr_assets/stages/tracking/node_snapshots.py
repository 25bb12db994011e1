"""Stage `node_snapshots`: bring the newest-per-node table up to the staged Parquet; compaction and retention of days.

Not here: what is staged (`spark.sink`), the view that shows it (`adapters.published`).
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.history import compact_day, place_staged, remove_before, remove_covered, stream_folder
from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

#: An open day is compacted too once it has this many files: a view over thousands of them is slow to open.
_MANY_FILES = 200


def staging_folder(site: Site, stream: StreamSettings, covered: SequenceRange) -> Path:
    """Return where a batch's writers put their Parquet files."""
    return site.folder.resolve() / "staging" / stream.asset_prefix[1] / f"{covered.first}-{covered.next}"


def index_staged(site: Site, stream: StreamSettings, report: StreamReport) -> bool:
    """Put staged files in their place and the nodes' newest messages into the table; returns whether there were any."""
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    batches = site.state.staged(stream.stream)
    for first, after in batches:
        covered = SequenceRange(first, after)
        files = place_staged(staging_folder(site, stream, covered), folder, covered)
        reach(Point.PLACING_SNAPSHOTS)
        site.state.index_snapshots(stream.stream, first, after, files)
        report.snapshots += 1
        site.changed()
    return bool(batches)


def compact(site: Site, stream: StreamSettings) -> None:
    """Compact closed days, delete days beyond the retention and what no batch knows; once a run.

    Files that were compacted go with the next run: until this one has published, a reader's view still names them.
    """
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    today = datetime.fromtimestamp(site.now_ns() / 1e9, UTC).date()
    retention_ns = site.settings.snapshots_retention_ns
    if retention_ns is not None:
        oldest = (today - timedelta(days=max(1, retention_ns // 86_400_000_000_000))).isoformat()
        lost = [file for file in site.state.snapshot_files(stream.stream) if file.rpartition("date=")[2][:10] < oldest]
        if lost:
            site.state.forget_snapshots(stream.stream, lost)
        if remove_before(folder, oldest):
            site.changed()
    for day in sorted(folder.glob("date=*")):
        remove_covered(day)
        closed = day.name.removeprefix("date=") < today.isoformat()
        if (closed or sum(1 for _ in day.glob("*.parquet")) >= _MANY_FILES) and (whole := compact_day(day)):
            site.state.move_snapshots(stream.stream, str(day), whole)
            site.changed()
    _remove_orphans(site, stream)


def _remove_orphans(site: Site, stream: StreamSettings) -> None:
    known = {f"{first}-{after}" for first, after in site.state.staged(stream.stream)}
    intent = site.state.open_intent(stream.stream)
    if intent:
        known.add(f"{intent.first}-{intent.next}")
    for folder in (site.folder / "staging" / stream.asset_prefix[1]).glob("*-*"):
        if folder.name not in known:
            shutil.rmtree(folder, ignore_errors=True)
