"""The status page as text and as a file.

Every text that comes from outside is escaped by the template, and cut off when it is too long to be a name. Not here: what is
asked of the tables (`adapters.published.status_queries`), who gets the page (`serving`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.published.status_queries import Status, status
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import RunError, SrAssetsError

if TYPE_CHECKING:
    from jinja2 import Template

    from sr_assets.settings import Settings

#: How many rows a section shows.
_MOST_ROWS: Final = 100
#: A longer name or error is cut off.
_LONGEST_TEXT: Final = 160
#: The chart's size; it is stretched to the width of the page.
_CHART_WIDTH, _CHART_HEIGHT = 960, 100
#: Tables that are older are marked: sites that are busy publish every few seconds, others with each run.
_OLD: Final = timedelta(hours=1)


def render_page(settings: Settings, refresh_seconds: int | None = None) -> str:
    """Return the page; a browser is to ask for it again after a while. Raises RunError when nothing is published yet."""
    return _template().render(
        replicator=settings.replicator,
        now=datetime.now(UTC),
        refresh_seconds=refresh_seconds,
        most=_MOST_ROWS,
        **_shown(status(settings.home)),
    )


def render_problem(settings: Settings, refresh_seconds: int | None = None) -> str:
    """Return the page, or one that says why there is none yet."""
    try:
        return render_page(settings, refresh_seconds)
    except SrAssetsError as error:
        return _template("nothing.html").render(
            replicator=settings.replicator, reason=str(error), refresh_seconds=refresh_seconds
        )


def write_page(settings: Settings, file: Path) -> None:
    """Write the page to a file, atomically, with the permissions of the published tables; one that exists is replaced.

    Raises RunError when nothing is published yet or the file cannot be written.
    """
    page, draft = render_page(settings), None
    try:
        with NamedTemporaryFile(
            "w", dir=file.parent, prefix=f".{file.name}.", delete=False, encoding="utf-8"
        ) as output:
            draft = Path(output.name)
            output.write(page)
        draft.chmod(settings.published_mode)
        draft.replace(file)
    except OSError as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        raise RunError(
            f"{file} cannot be written: {error.strerror}; name a file in a folder that exists and is yours"
        ) from None


@cache
def _template(name: str = "status.html") -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"text": _text, "duration": duration, "moment": _moment}
    return environment.from_string(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _shown(published: Status) -> dict[str, Any]:
    """Return what the template is given."""
    sites = published.sites
    totals = {column: sum(site[column] for site in sites) for column in ("up", "timeout", "retired", "new_24h")}
    blind = [site for site in sites if site["observer"] == "blind"]
    return {
        "published": published,
        "old": datetime.now(UTC) - published.as_of > _OLD,
        "totals": totals,
        "blind": len(blind),
        "site_count": len({(site["replicator"], site["name"]) for site in sites}),
        "failing": [stream for stream in published.replication if stream["last_error"]],
        "paused": [stream for stream in published.replication if stream["paused"]],
        "charts": [_chart("up", published, 0), _chart("silent", published, 1)] if sites else [],
        "hours": [published.as_of - timedelta(hours=hours) for hours in (24, 18, 12, 6)],
    }


def _chart(name: str, published: Status, column: int) -> dict[str, Any]:
    """Return a line in steps, and the area below it, of one number of the chart."""
    values = [counted[column] for counted in published.chart]
    top = max(*values, 1)
    width = _CHART_WIDTH / len(values)
    # A line of two pixels is not cut off at the top.
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


def _text(value: Any) -> str:
    """Return a text from outside in the length of a name, without what is not to be seen."""
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value)[: _LONGEST_TEXT + 1]
    )
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}…"


def _moment(at: datetime, today: datetime | None = None) -> str:
    """Return a time in UTC: the time of day when it is of the same day as `today`, else with its date."""
    utc = at.astimezone(UTC)
    if today is None:
        return f"{utc:%Y-%m-%d %H:%M}"
    return f"{utc:%H:%M:%S}" if utc.date() == today.astimezone(UTC).date() else f"{utc:%d %b %H:%M}"
