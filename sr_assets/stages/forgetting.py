"""`forget`: deleting a removed stream or site, or a site that feeds reported.

Published tables go first and files last, so that no reader finds a table without its files. After an interruption,
forgetting the same name again completes the deletion.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from sr_assets.adapters import control
from sr_assets.adapters.private import remove_files
from sr_assets.adapters.progress_lines import LongWork, tracked
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.history import FILES, site_history, stream_folder
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.state.database import BrokenStateError
from sr_assets.adapters.state.global_view import ReportedSite
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings, asset_name
from sr_assets.stages.clock import Clock
from sr_assets.stages.site import Site, published_sites

_OWNER = "forget"
_PUBLISHING = "publishing the tables"
_WAIT_SECONDS = 60.0
#: The folders of unfinished work in a site's folder.
SCRATCH = (
    ".checkpoint.zip.parts",
    ".restoring",
    "compaction",
    "connections",
    "found",
    "staging",
    "standby",
    "writers",
)
#: The files in a site's folder.
_FILES = (
    "state.duckdb*",
    "lock",
    "alive",
    "looked",
    "fence.json",
    "checkpoint.zip",
    "leader.json",
    "election.lock",
    "lake-*.lock",
    ".*.json.*",
)


def forget(settings: Settings, site: str, stream: str | None = None, replicator: str | None = None) -> list[str]:
    """Delete a site, or one of its streams; return one line per location.

    `replicator` selects among reported sites of one name. Raises ConfigurationError if it is still configured, unknown
    or ambiguous, and SiteBusyError during a run.
    """
    lines = []
    if replicator in (None, settings.replicator):
        _refuse_configured(settings, site, stream)
        lines += _forget_here(settings, site, stream)
    lines += _forget_reported(settings, site, stream, replicator)
    if not lines:
        raise ConfigurationError(_unknown(settings, site, stream, replicator))
    return lines


def _refuse_configured(settings: Settings, site: str, stream: str | None) -> None:
    entries = [entry.stream for entry in settings.sites.get(site, ())]
    if stream is None and entries:
        raise ConfigurationError(
            f"--site {site} is still configured, with {', '.join(entries)}; remove its entries from the configuration"
            " first, or select a removed stream with --stream"
        )
    if stream in entries:
        raise ConfigurationError(
            f"--stream {stream} is still configured at site {site}; remove its entry from the configuration first"
        )


def _forget_here(settings: Settings, site: str, stream: str | None) -> list[str]:
    """Delete a local site's data."""
    folder = settings.home / "sites" / site
    if not _holds(settings, site, stream):
        return []
    if site in settings.sites:
        assert stream is not None  # a configured site is refused
        with Site(settings, site, owner=_OWNER, run_id=_OWNER, wait_seconds=_WAIT_SECONDS) as opened:
            counts = _erase(opened.state, [stream])
            with LongWork(_PUBLISHING):
                opened.publish()
        control.forget(settings.home, site, stream)
        return [_removed(f"{site}/{stream}", {**counts, **_remove_files(settings, site, stream)})]
    with SiteLock(folder, _OWNER, _WAIT_SECONDS):
        counts, left = _erase_unconfigured(folder, stream)
        with LongWork(_PUBLISHING):
            _unpublish(settings, site, folder if left else None)
        counts |= _remove_files(settings, site, stream if left else None)
        if not left:
            for name in SCRATCH:
                shutil.rmtree(folder / name, ignore_errors=True)
            control.end_upgrade(folder)
            control.forget(settings.home, site)
            for file in folder.iterdir():
                if not file.is_dir() and any(fnmatch(file.name, pattern) for pattern in _FILES):
                    file.unlink()
            # Other files are not ours.
            with contextlib.suppress(OSError):
                folder.rmdir()
    return [_removed(site if stream is None else f"{site}/{stream}", counts)]


def _erase_unconfigured(folder: Path, stream: str | None) -> tuple[dict[str, int], list[str]]:
    """Delete a stream's rows, or all, from an unconfigured site's state; return counts and the remaining streams."""
    if not (folder / "state.duckdb").exists():
        return {}, []
    try:
        with SiteState(folder) as state:
            return _erase(state, state.known_streams() if stream is None else [stream]), state.known_streams()
    except BrokenStateError:
        if stream is not None:
            raise
        return {}, []


def _holds(settings: Settings, site: str, stream: str | None) -> bool:
    """Return whether this home has data of a site, or of one of its streams."""
    if stream is not None:
        return stream_folder(settings.home, site, stream).exists() or stream in _known_streams(settings, site)
    return site in _site_folders(settings) or site_history(settings.home, site).exists()


def _site_folders(settings: Settings) -> list[str]:
    """Return the sites that this home has, which excludes names such as `..`."""
    marks = ("lock", "state.duckdb")
    folders = {file.parent.name for name in marks for file in (settings.home / "sites").glob(f"*/{name}")}
    known = control.query(settings.home, "SELECT site FROM site_status UNION SELECT site FROM paused")
    return sorted(folders.union(site for (site,) in known))


def _known_streams(settings: Settings, site: str) -> list[str]:
    folder = settings.home / "sites" / site
    if site not in _site_folders(settings) or not (folder / "state.duckdb").exists():
        return []
    with SiteLock(folder, _OWNER, _WAIT_SECONDS), SiteState(folder) as state:
        return state.known_streams()


def _erase(state: SiteState, streams: Sequence[str]) -> dict[str, int]:
    """Delete every row of some streams; return the number of each kind."""
    counts: dict[str, int] = {}
    with state.transaction():
        for stream in tracked("deleting rows of streams", streams):
            for noun, count in state.erase_stream(stream).items():
                counts[noun] = counts.get(noun, 0) + count
    return counts


def _unpublish(settings: Settings, site: str, folder: Path | None) -> None:
    """Publish an unconfigured site's remaining rows, or an empty state if its folder has none."""
    if not (settings.home / "fleet.duckdb").exists():
        return
    run = Run(Clock(settings.home / "sites" / site).now_ns(), _OWNER)
    with tempfile.TemporaryDirectory() as empty, SiteState(folder or Path(empty)) as state:
        sites, mode = published_sites(settings), settings.published_mode
        publish_site(settings.home, site, state, [], sites=sites, run=run, mode=mode)


def _remove_files(settings: Settings, site: str, stream: str | None) -> dict[str, int]:
    """Delete the Parquet history of a stream, or of all streams, and other files of its runs."""
    history = site_history(settings.home, site) if stream is None else stream_folder(settings.home, site, stream)
    count = sum(1 for _ in history.rglob(FILES[0]))
    with LongWork(f"deleting {count} files of the history"):
        remove_files(history, *FILES)
    if stream is not None:
        for kind in ("staging", "writers"):
            shutil.rmtree(settings.home / "sites" / site / kind / asset_name(stream), ignore_errors=True)
    return {"history files": count}


def _forget_reported(settings: Settings, site: str, stream: str | None, replicator: str | None) -> list[str]:
    """Delete a site from the feeds' tables of this configuration, and publish immediately."""
    lines = []
    for centre in _centres(settings):
        with Site(settings, centre, owner=_OWNER, run_id=_OWNER, wait_seconds=_WAIT_SECONDS) as opened:
            tables = opened.state.global_tables
            meant = [row for row in tables.reported_sites() if _means(row, site, stream, replicator)]
            replicators = sorted({row.replicator for row in meant})
            if len(replicators) > 1:
                raise ConfigurationError(
                    f"--site {site} is ambiguous; choose one with --replicator: {', '.join(replicators)}"
                )
            if meant:
                with opened.state.transaction(), LongWork(f"deleting rows in the feeds of {centre}"):
                    counts = tables.forget_site(site, stream, replicators[0])
                with LongWork(_PUBLISHING):
                    opened.publish()
                label = "/".join(filter(None, (replicators[0], site, stream)))
                lines.append(_removed(f"{label} in the feeds of {centre}", counts))
    return lines


def _centres(settings: Settings) -> Iterator[str]:
    """Yield the sites of this configuration that have a feed and a state."""
    for centre in dict.fromkeys(feed.name for feed in settings.feeds):
        if (settings.home / "sites" / centre / "state.duckdb").exists():
            yield centre


def _means(reported: ReportedSite, site: str, stream: str | None, replicator: str | None) -> bool:
    return reported.name == site and stream in (None, reported.stream) and replicator in (None, reported.replicator)


def _removed(label: str, counts: Mapping[str, int]) -> str:
    return f"forgot {label}: " + (", ".join(f"{count} {noun}" for noun, count in counts.items() if count) or "its name")


def _unknown(settings: Settings, site: str, stream: str | None, replicator: str | None) -> str:
    """Return the error for an unknown name, with the known names."""
    here = [
        f"{name}/{known}"
        for name in _site_folders(settings)
        for known in _known_streams(settings, name)
        if known not in {entry.stream for entry in settings.sites.get(name, ())}
    ]
    reported = []
    for centre in _centres(settings):
        with SiteLock(folder := settings.home / "sites" / centre, _OWNER, _WAIT_SECONDS), SiteState(folder) as state:
            reported += ["/".join(filter(None, row)) for row in state.global_tables.reported_sites()]
    named = {"site": site, "stream": stream, "replicator": replicator}
    options = " ".join(f"--{option} {name}" for option, name in named.items() if name)
    return (
        f"{options} is unknown; left from an earlier configuration: {', '.join(here) or 'nothing'};"
        f" reported by feeds (replicator/site/stream): {', '.join(dict.fromkeys(reported)) or 'nothing'}"
    )
