"""Forgetting what is no more: a stream or a site that left the configuration, a site that feeds reported.

Here: what a name means, what is removed of it, and in which order. Not here: the statements (`adapters.state`), nodes
that are retired for long (each stage's own retention).

Published tables go first and files last, so that no reader finds a table whose files are gone; whatever was cut off is
done by forgetting the same once more.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sr_assets.adapters.published.history import site_history, stream_folder
from sr_assets.adapters.published.index import Run
from sr_assets.adapters.published.publishing import publish_site
from sr_assets.adapters.state.database import BrokenStateError
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.pausing import forget_paused
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import asset_name
from sr_assets.stages.clock import Clock
from sr_assets.stages.site import Site, published_sites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sr_assets.adapters.state.global_view import ReportedSite
    from sr_assets.settings import Settings

_OWNER = "forget"
_WAIT_SECONDS = 60.0


def forget(settings: Settings, site: str, stream: str | None = None, replicator: str | None = None) -> list[str]:
    """Remove what is known of a site, or of one stream of it; returns one line for each place it was removed from.

    `replicator` chooses among sites of one name that feeds report. Raises ConfigurationError when it is still configured,
    when the name is unknown, or means several sites; SiteBusyError when a run is under way.
    """
    local = replicator in (None, settings.replicator)
    lines = []
    if local:
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
            f"--site {site} is still configured, with {', '.join(entries)}: take its entries out of the configuration"
            " first, or name a stream that has left it with --stream"
        )
    if stream in entries:
        raise ConfigurationError(
            f"--stream {stream} is still configured at site {site}: take its entry out of the configuration first"
        )


# ------------------------------------------------------------------------------------------------------- at a site


def _forget_here(settings: Settings, site: str, stream: str | None) -> list[str]:
    """Remove what a site of this home knew."""
    folder = settings.home / "sites" / site
    if not _holds(settings, site, stream):
        return []
    if site in settings.sites:
        assert stream is not None  # a site that is configured is refused
        with Site(settings, site, owner=_OWNER, run_id=_OWNER, wait_seconds=_WAIT_SECONDS) as opened:
            counts = _erase(opened.state, [stream])
            opened.publish()
        forget_paused(folder, stream)
        return [_removed(f"{site}/{stream}", {**counts, **_remove_files(settings, site, stream)})]
    with SiteLock(folder, _OWNER, _WAIT_SECONDS):
        counts, left = _erase_unconfigured(folder, stream)
        _unpublish(settings, site, folder if left else None)
        counts |= _remove_files(settings, site, stream if left else None)
        if not left:
            shutil.rmtree(folder)
    return [_removed(site if stream is None else f"{site}/{stream}", counts)]


def _erase_unconfigured(folder: Path, stream: str | None) -> tuple[dict[str, int], list[str]]:
    """Drop a stream's rows, or all, from the state of a site that is not configured; returns counts and what is left."""
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
    """Tell whether this home holds anything of a site, or of one stream of it."""
    if stream is not None:
        return stream_folder(settings.home, site, stream).exists() or stream in _known_streams(settings, site)
    return site in _site_folders(settings) or site_history(settings.home, site).exists()


def _site_folders(settings: Settings) -> list[str]:
    """Return the sites with a folder in this home: a name such as `..` is none of them."""
    return sorted(folder.name for folder in (settings.home / "sites").glob("*") if folder.is_dir())


def _known_streams(settings: Settings, site: str) -> list[str]:
    folder = settings.home / "sites" / site
    if site not in _site_folders(settings) or not (folder / "state.duckdb").exists():
        return []
    with SiteLock(folder, _OWNER, _WAIT_SECONDS), SiteState(folder) as state:
        return state.known_streams()


def _erase(state: SiteState, streams: Sequence[str]) -> dict[str, int]:
    """Drop every row of some streams; returns how many of each kind."""
    counts: dict[str, int] = {}
    with state.transaction():
        for stream in streams:
            for noun, count in state.erase_stream(stream).items():
                counts[noun] = counts.get(noun, 0) + count
    return counts


def _unpublish(settings: Settings, site: str, folder: Path | None) -> None:
    """Publish a site that is not configured with what is left in its folder; without one with an empty state."""
    if not (settings.home / "fleet.duckdb").exists():
        return
    run = Run(Clock(settings.home / "sites" / site).now_ns(), _OWNER)
    with tempfile.TemporaryDirectory() as empty, SiteState(folder or Path(empty)) as state:
        publish_site(
            settings.home,
            site,
            state,
            [],
            sites=published_sites(settings),
            run=run,
            mode=settings.published_mode,
        )


def _remove_files(settings: Settings, site: str, stream: str | None) -> dict[str, int]:
    """Remove the Parquet history of a stream, of all of them without one, and what else its runs left in the folder."""
    history = site_history(settings.home, site) if stream is None else stream_folder(settings.home, site, stream)
    count = sum(1 for _ in history.rglob("*.parquet"))
    shutil.rmtree(history, ignore_errors=True)
    if stream is not None:
        for kind in ("staging", "writers"):
            shutil.rmtree(settings.home / "sites" / site / kind / asset_name(stream), ignore_errors=True)
    return {"history files": count}


# ----------------------------------------------------------------------------------------------------- at the centre


def _forget_reported(settings: Settings, site: str, stream: str | None, replicator: str | None) -> list[str]:
    """Remove what the feeds of this configuration reported of a site, and publish at once."""
    lines = []
    for centre in _centres(settings):
        with Site(settings, centre, owner=_OWNER, run_id=_OWNER, wait_seconds=_WAIT_SECONDS) as opened:
            tables = opened.state.global_tables
            meant = [row for row in tables.reported_sites() if _means(row, site, stream, replicator)]
            replicators = sorted({row.replicator for row in meant})
            if len(replicators) > 1:
                raise ConfigurationError(
                    f"--site {site}: several replicators have a site of that name, choose one with --replicator:"
                    f" {', '.join(replicators)}"
                )
            if meant:
                with opened.state.transaction():
                    counts = tables.forget_site(site, stream, replicators[0])
                opened.publish()
                label = "/".join(filter(None, (replicators[0], site, stream)))
                lines.append(_removed(f"{label} as the feeds of {centre} reported it", counts))
    return lines


def _centres(settings: Settings) -> Iterator[str]:
    """Yield the sites of this configuration that have a feed and ran before."""
    for centre in dict.fromkeys(feed.name for feed in settings.feeds):
        if (settings.home / "sites" / centre / "state.duckdb").exists():
            yield centre


def _means(reported: ReportedSite, site: str, stream: str | None, replicator: str | None) -> bool:
    return reported.name == site and stream in (None, reported.stream) and replicator in (None, reported.replicator)


# -------------------------------------------------------------------------------------------------------- in words


def _removed(label: str, counts: Mapping[str, int]) -> str:
    return f"forgot {label}: " + (", ".join(f"{count} {noun}" for noun, count in counts.items() if count) or "its name")


def _unknown(settings: Settings, site: str, stream: str | None, replicator: str | None) -> str:
    """Return that there is nothing of that name, and what there is."""
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
    asked = (
        f"--site {site}"
        + (f" --stream {stream}" if stream else "")
        + (f" --replicator {replicator}" if replicator else "")
    )
    return (
        f"{asked}: nothing is known of it; left from an earlier configuration: {', '.join(here) or 'nothing'};"
        f" reported by feeds (replicator/site/stream): {', '.join(dict.fromkeys(reported)) or 'nothing'}"
    )
