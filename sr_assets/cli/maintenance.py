"""The commands `maintenance add`, `maintenance list` and `maintenance end`."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from sr_assets.adapters import times
from sr_assets.cli.base import SECONDS, TIME, cli, configured, echo, form_option, note_action
from sr_assets.cli.render import Format, show
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.tracking.windows import KnownWindow


@cli.group()
def maintenance() -> None:
    """Suppress the announcements of planned work."""


@maintenance.command(epilog="Example: sr-assets maintenance add --match 'web*' --for 2h --reason 'new switches'")
@click.option("--match", "globs", multiple=True, metavar="M", help="Glob of nodes; may be repeated.")
@click.option("--class", "classes", multiple=True, metavar="C", help="Class of nodes; may be repeated.")
@click.option("--site", metavar="S", help="Glob of sites (default: every site).")
@click.option("--from", "from_ns", type=TIME, metavar="T", help="Begin then (default: now).")
@click.option("--to", "to_ns", type=TIME, metavar="T", help="End then.")
@click.option("--for", "seconds", type=SECONDS, metavar="D", help="End after this time.")
@click.option("--reason", required=True, metavar="R", help="The reason, for people.")
@configured
def add(
    settings: "Settings",
    globs: tuple[str, ...],
    classes: tuple[str, ...],
    site: str | None,
    from_ns: int | None,
    to_ns: int | None,
    seconds: float | None,
    reason: str,
) -> None:
    """Add a window, and print its id."""
    from sr_assets.domain.tracking.maintenance import Window
    from sr_assets.stages.tracking.windows import add_window

    if not (globs or classes):
        raise ConfigurationError("maintenance add: needs --match or --class; --match '*' is every node")
    if (to_ns is None) == (seconds is None):
        raise ConfigurationError("maintenance add: needs one of --to and --for; name the end of the window")
    begin_ns = times.time_ns() if from_ns is None else from_ns
    end_ns = begin_ns + round((seconds or 0) * 1e9) if to_ns is None else to_ns
    if end_ns <= begin_ns:
        option = "--for" if to_ns is None else f"--to {_text(end_ns)}"
        raise ConfigurationError(f"{option}: is not after --from {_text(begin_ns)}; choose a later end")
    window_id, sites = add_window(settings, Window("", globs, begin_ns, end_ns, reason=reason, classes=classes), site)
    span = f"{_text(begin_ns)} to {_text(end_ns)}"
    about = ", ".join((*globs, *(f"class {name}" for name in classes)))
    note_action(settings, "maintenance add", ", ".join(sites), f"{window_id}: {about}, {span}: {reason}")
    echo(window_id)


@maintenance.command("list", epilog="Example: sr-assets maintenance list")
@form_option
@configured
def list_windows(settings: "Settings", form: Format) -> None:
    """List every window, configured or added, with its id."""
    from sr_assets.stages.tracking.windows import known_windows

    columns = ("id", "state", "match", "class", "site", "from", "to", "cron", "for", "reason", "added")
    now_ns = times.time_ns()
    rows = [_row(known, now_ns) for known in known_windows(settings)]
    show(columns, rows, form, first=("id", "state", "match", "site", "reason"))


@maintenance.command(epilog="Example: sr-assets maintenance end 3f1c")
@click.argument("window_id", metavar="ID")
@configured
def end(settings: "Settings", window_id: str) -> None:
    """End an added window now."""
    from sr_assets.stages.tracking.windows import end_windows

    sites = end_windows(settings, window_id)
    note_action(settings, "maintenance end", ", ".join(sites), window_id)
    echo(f"{window_id}: ended; the next run announces the nodes that are not up")


def _row(known: "KnownWindow", now_ns: int) -> tuple[Any, ...]:
    window = known.window
    once = window.cron is None
    return (
        window.id,
        known.state(now_ns),
        ", ".join(window.globs) or "*",
        ", ".join(window.classes) or None,
        ", ".join(known.sites),
        _at(window.from_ns) if once else None,
        _at(window.to_ns) if once else None,
        window.cron,
        None if once else duration(window.length_ns / 1e9),
        window.reason,
        known.added,
    )


def _at(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns / 1e9, UTC)


def _text(at_ns: int) -> str:
    return f"{_at(at_ns):%Y-%m-%dT%H:%M:%SZ}"
