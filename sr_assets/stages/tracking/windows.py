"""The maintenance windows of all sites, as people see them, and their commands."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from sr_assets.adapters import times
from sr_assets.adapters.published.fleet_reader import Rows
from sr_assets.adapters.published.status_queries import STEP, STEPS, RecentNodes
from sr_assets.adapters.state.operator_settings import add_windows, added_windows, end_window
from sr_assets.adapters.state.orders import request_checkpoint
from sr_assets.adapters.state.status_file import outdate_status
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.tracking.maintenance import Window, covered
from sr_assets.settings import Settings
from sr_assets.settings.operator_rules import unknown_class


@dataclass(slots=True)
class KnownWindow:
    """A window and the tracked streams (`name/stream`) that it is about; `added` by command or configured."""

    window: Window
    added: bool
    labels: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[str]:
        """The sites of its streams."""
        return sorted({label.split("/")[0] for label in self.labels})

    def state(self, at_ns: int) -> str:
        """Return whether the window is `active`, `planned` or `over` at a time."""
        if self.window.end_ns(at_ns) is not None:
            return "active"
        return "planned" if self.window.cron or self.window.from_ns > at_ns else "over"


def known_windows(settings: Settings) -> list[KnownWindow]:
    """Return all windows: the configured ones, then those added by command, ended ones included. Raises RunError."""
    known: dict[tuple[str, bool], KnownWindow] = {}
    for added in (False, True):
        for stream in settings.streams:
            windows = added_windows(settings.home / "sites" / stream.name) if added else stream.windows
            for window in windows if stream.tracked else ():
                known.setdefault((window.id, added), KnownWindow(window, added)).labels.append(stream.label)
    return list(known.values())


def mark_maintained(settings: Settings, rows: Rows) -> Rows:
    """Return rows with the column `maintenance`, the values of `maintenance_of`."""
    ids = maintenance_of(settings, rows.columns)
    return Rows((*rows.columns, "maintenance"), [(*row, ids(row)) for row in rows.values])


def maintenance_of(settings: Settings, columns: Sequence[str]) -> Callable[[tuple[Any, ...]], str | None]:
    """Return a function that returns the ids of the windows that are active for a row of these columns, or None.

    With a column `node`, a row is about that node, else about the whole stream of its columns `name` and `stream`. A row of
    another `replicator` is about no window of this installation.
    """
    windows: dict[str, list[Window]] = {}
    now_ns = times.time_ns()
    for known in known_windows(settings):
        for label in known.labels if known.state(now_ns) == "active" else ():
            windows.setdefault(label, []).append(known.window)

    def ids(values: tuple[Any, ...]) -> str | None:
        if not windows:
            return None
        row = dict(zip(columns, values, strict=True))
        ours = row.get("replicator") in (None, settings.replicator)
        active = windows.get(f"{row['name']}/{row['stream']}", ()) if ours else ()
        return (
            ", ".join(each.id for each in active if "node" not in row or each.matches(row["node"], row.get("class")))
            or None
        )

    return ids


def active_spans(settings: Settings, recent: RecentNodes) -> list[tuple[datetime, datetime]]:
    """Return the times of the last day that windows cover, in order and disjoint."""
    since, until = (recent.as_of - STEPS * STEP, recent.as_of)
    windows = [known.window for known in known_windows(settings)]
    spans = covered(windows, *(int(at.timestamp()) * SECOND_NS for at in (since, until)))
    return [
        (datetime.fromtimestamp(first / SECOND_NS, UTC), datetime.fromtimestamp(following / SECOND_NS, UTC))
        for first, following in spans
        if first < following
    ]


def add_window(settings: Settings, window: Window, site: str | None) -> tuple[str, list[str]]:
    """Add a window to the sites that match a glob (None: all); return its new id and the sites.

    Raises ConfigurationError if no tracked site matches or has a class, and RunError if the window cannot be written.
    """
    tracked = list(dict.fromkeys(stream.name for stream in settings.streams if stream.tracked))
    sites = [name for name in tracked if site is None or fnmatchcase(name, site)]
    if not sites:
        wanted = "no site is tracked" if site is None else f"--site {site}: matches no site that tracks nodes"
        known = (
            f"; {did_you_mean(site or '', tracked)}sites: {', '.join(tracked)}" if tracked else "; set inspect_duration"
        )
        raise ConfigurationError(wanted + known)
    known_classes = [name for stream in settings.streams if stream.name in sites for name in stream.class_names]
    if problem := unknown_class(window.classes, known_classes):
        raise ConfigurationError(f"--class {problem}")
    window_id = uuid.uuid4().hex[:8]
    row = replace(window, id=window_id)
    for name in sites:
        add_windows(settings.home / "sites" / name, [row])
        request_checkpoint(settings, name)
    return window_id, sites


def end_windows(settings: Settings, window_id: str) -> list[str]:
    """End an added window now; return its sites. Raises ConfigurationError if it is configured, unknown or over."""
    known = {each.window.id: each for each in known_windows(settings)}
    window = known.get(window_id)
    if window is None:
        raise ConfigurationError(f"window {window_id!r} is unknown; `sr-assets maintenance list` shows the ids")
    if not window.added:
        raise ConfigurationError(f"window {window_id!r} is configured; remove it from the key maintenance")
    now_ns, ended = times.time_ns(), []
    for site in window.sites:
        folder = settings.home / "sites" / site
        if end_window(folder, window_id, now_ns):
            outdate_status(folder)
            request_checkpoint(settings, site)
            ended.append(site)
    if not ended:
        raise ConfigurationError(f"window {window_id!r} is over; `sr-assets maintenance list` shows the others")
    return ended
