"""The status page: one self-contained HTML file made from the published tables, readable offline and on a phone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.private import write_private
from sr_assets.adapters.published.status_queries import Status, status
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.operate.health import OTHERS_MAY_READ
from sr_assets.operate.ui_access import refuse_foreign_page
from sr_assets.settings import Settings
from sr_assets.stages.tracking.windows import known_windows

if TYPE_CHECKING:
    from jinja2 import Template

#: Most rows in a section.
_MOST_ROWS: Final = 100
#: Longer names and errors are truncated.
_LONGEST_TEXT: Final = 160
#: The chart's coordinates; the browser stretches it to the width of the page.
_CHART_WIDTH, _CHART_HEIGHT = 960, 100
#: Older tables get a warning: busy sites publish every few seconds, others after each run.
_OLD: Final = timedelta(hours=1)
PAGE_PATHS: Final = ("/", "/status")
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_REFRESH_SECONDS: Final = 30
#: The shortest time between two renderings, and the share of a core that they may take.
_KEEP_SECONDS: Final = 5.0
_SHARE: Final = 0.05
_PRIVATE: Final = (
    "this page is for the owner of the published tables only; set published_mode: 0644 to show it to other users"
)


def render_page(settings: Settings, refresh_seconds: int | None = None) -> str:
    """Return the page; browsers reload it after `refresh_seconds`. Raises RunError if nothing is published yet."""
    return _template().render(
        replicator=settings.replicator,
        now=times.utc_now(),
        refresh_seconds=refresh_seconds,
        most=_MOST_ROWS,
        maintenance=[each for each in known_windows(settings) if each.state(times.time_ns()) == "active"],
        **_shown(status(settings.home)),
    )


def render_problem(settings: Settings, refresh_seconds: int | None = None) -> str:
    """Return the page, or one with the reason why there is none yet."""
    try:
        return render_page(settings, refresh_seconds)
    except SrAssetsError as error:
        return _template("nothing.html").render(
            replicator=settings.replicator, reason=str(error), refresh_seconds=refresh_seconds
        )


def write_page(settings: Settings, file: Path) -> None:
    """Replace a file by the page, atomically, with the permissions of the published tables.

    Raises RunError if nothing is published yet or the file cannot be written.
    """
    page = render_page(settings)
    try:
        write_private(file, page, settings.published_mode)
    except OSError as error:
        raise RunError(
            f"{file}: cannot be written: {error.strerror}; choose a file in an existing folder of yours"
        ) from None


@cache
def _template(name: str = "status.html") -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"text": _text, "duration": duration, "moment": _moment}
    return environment.from_string(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _shown(published: Status) -> dict[str, object]:
    """Return the template's variables."""
    sites = published.sites
    totals = {column: sum(site[column] for site in sites) for column in ("up", "timeout", "retired", "new_24h")}
    blind = [site for site in sites if site["observer"] == "blind"]
    return {
        "published": published,
        "old": times.utc_now() - published.as_of > _OLD,
        "totals": totals,
        "blind": len(blind),
        "held": sum(site["held"] for site in sites),
        "suppressed": sum(site["suppressed"] for site in sites),
        "outages": [site for site in sites if site["outage"]],
        "site_count": len({(site["replicator"], site["name"]) for site in sites}),
        "failing": [stream for stream in published.replication if stream["last_error"]],
        "paused": [stream for stream in published.replication if stream["paused"]],
        "charts": [_chart("up", published, 0), _chart("silent", published, 1)] if sites else [],
        "hours": [published.as_of - timedelta(hours=hours) for hours in (24, 18, 12, 6)],
    }


def _chart(name: str, published: Status, column: int) -> dict[str, object]:
    """Return the paths of a step line and the area below it, for one column of the hourly counts."""
    values = [counted[column] for counted in published.chart]
    top = max(*values, 1)
    width = _CHART_WIDTH / len(values)
    # Leave room for the line's width of two pixels at the top.
    heights = [_CHART_HEIGHT - 2 - value / top * (_CHART_HEIGHT - 4) for value in values]
    steps = " ".join(f"V{height:.1f}H{(index + 1) * width:.1f}" for index, height in enumerate(heights))
    line = f"M0 {heights[0]:.1f}{steps}"
    return {
        "name": name,
        "line": line,
        "area": f"{line}V{_CHART_HEIGHT}H0Z",
        "now": values[-1],
        "least": min(values),
        "most": max(values),
    }


def _text(value: object) -> str:
    """Return a text from outside, truncated, with unprintable characters replaced."""
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value)[: _LONGEST_TEXT + 1]
    )
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}…"


def _moment(at: datetime, today: datetime | None = None) -> str:
    """Return a time in UTC, without its date if that is `today`'s."""
    utc = at.astimezone(UTC)
    if today is None:
        return f"{utc:%Y-%m-%d %H:%M}"
    return f"{utc:%H:%M:%S}" if utc.date() == today.astimezone(UTC).date() else f"{utc:%d %b %H:%M}"


class PagePublisher:
    """The cached status page of a home, shared by concurrent requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._page, self._until = "", 0.0

    def page(self) -> str:
        """Return the page, at most a few seconds old."""
        with self._guard:
            began = times.monotonic()
            if began >= self._until:
                self._page = render_problem(self._settings, _REFRESH_SECONDS)
                ended = times.monotonic()
                self._until = ended + max(_KEEP_SECONDS, (ended - began) / _SHARE)
            return self._page

    def refusal(self, headers: Iterable[tuple[str, str]], is_owner: Callable[[], bool]) -> str | None:
        """Return why a client may not see the page, or None if it may.

        World-readable tables may be seen by everyone. Others only by their owner on this machine, and not in cross-site
        requests.
        """
        if self._settings.published_mode & OTHERS_MAY_READ:
            return None
        scope = {
            "type": "http",
            "method": "GET",
            "path": PAGE_PATHS[0],
            "query_string": b"",
            "headers": [(key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in headers],
        }
        if foreign := refuse_foreign_page(scope):
            return foreign.line
        return None if is_owner() else _PRIVATE


__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "PagePublisher", "render_page", "write_page"]
