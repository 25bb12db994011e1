"""Warnings of `check`, `run` and `up` before they begin, and below the rows of tables: one line each, with the remedy.

Add a warning here that the configuration and the home alone show. Not here: what only a server knows
(`stages.connectivity`), what a run finds (`operate.report`).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from sr_assets.adapters.logs import print_problem
from sr_assets.cli.render import age_seconds, age_text, print_note
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings import Settings


def warn(settings: "Settings") -> None:
    """Warn of keys without effect, exposed secrets, states that no entry names, and durations that are too short."""
    for warning in (
        *settings.warnings,
        *_exposed(settings),
        *_states_without_entry(settings),
        *_too_short_durations(settings),
    ):
        print_problem("warning", warning)


def hint(settings: "Settings") -> None:
    """Print which entries the servers could copy themselves: everything, unchanged, between clusters that are linked."""
    for stream in settings.streams:
        if stream.copies_all_unchanged and settings.linked(stream.source, stream.target):
            click.echo(
                f"hint: {stream.label}: copies everything unchanged between linked clusters; a native mirror does that faster,"
                " without headers of ours and without exactly-once checks in the target (docs/choosing.md)",
                err=True,
            )


def note_age(settings: "Settings") -> None:
    """Print below a table how old it is, and warn of each tracked stream whose node states may be stale.

    They may be stale once the watermark, by which silence is judged, is older than `warn_duration`. The watermark is
    the source's clock; this machine's may differ by some seconds.
    """
    from sr_assets.adapters.published.queries import freshness

    entries = {entry.label: entry for entry in settings.entries}
    rows = [row for row in freshness(settings.home) if row[0] in entries]
    if rows:
        print_note(age_text(min(as_of for _, as_of, _ in rows)))
    for label, _, watermark in rows:
        policy = entries[label].policy
        if policy is None or watermark is None:
            continue
        if (age := age_seconds(watermark)) > policy.warning_ns / 1e9:
            click.echo(
                f"warning: {label}: its watermark stands at {watermark:%Y-%m-%d %H:%M:%S} UTC, {duration(age)} ago, so"
                " node states may be stale: see that `sr-assets up` or `run` goes on, and ask `sr-assets lag`",
                err=True,
            )


def _exposed(settings: "Settings") -> list[str]:
    """Return a warning for each file with a key that everybody on this machine may read."""
    from sr_assets.adapters.security import exposed_secrets

    clusters = dict.fromkeys(cluster for entry in settings.entries for cluster in entry.clusters)
    files = dict.fromkeys(file for cluster in clusters for file in exposed_secrets(cluster))
    return [f"{file}: everybody on this machine may read this key; chmod 0600, or 0640 for a group" for file in files]


def _states_without_entry(settings: "Settings") -> Iterator[str]:
    """Yield a warning for each site and stream in this home that no entry of the configuration names any more.

    A misspelt or renamed entry begins anew, which copies everything a second time.
    """
    from sr_assets.adapters.published.queries import published_streams
    from sr_assets.stages.site import kept_sites

    known: dict[str, list[str]] = defaultdict(list)
    try:
        for name, stream in published_streams(settings.home):
            known[name].append(stream)
    except SrAssetsError:
        pass
    for site in kept_sites(settings):
        configured = [entry.stream for entry in settings.sites.get(site, ())]
        remark = "; its rows stay in the tables until then"
        if not configured:
            yield (
                f"site {site} has a state here ({', '.join(known[site]) or 'no stream'}), but no entry has that name: if it"
                f" was renamed, name it {site} again, or its streams are copied a second time; if it is no more:"
                f" `sr-assets forget --site {site}`{remark}"
            )
        for stream in sorted(set(known[site]) - set(configured) if configured else ()):
            yield (
                f"stream {site}/{stream} has a state here, but no entry names it: if it was misspelt, correct it; if it is"
                f" no more: `sr-assets forget --site {site} --stream {stream}`{remark}"
            )


def _too_short_durations(settings: "Settings") -> list[str]:
    """Return a warning for each tracked stream where most nodes come back by themselves.

    In a tree this happens when the upstream site copies more rarely than the warning duration.
    """
    from sr_assets.adapters.published.queries import recovery_ages

    try:
        ages = recovery_ages(settings.home)
    except SrAssetsError:
        return []
    return [
        f"{stream.label}: most nodes time out and recover, after {duration(ages[stream.label])}: warn_duration "
        f"({duration(stream.policy.warning_ns / 1e9)}) must exceed the time between their messages in the source"
        for stream in settings.streams
        if stream.policy is not None and stream.label in ages
    ]
