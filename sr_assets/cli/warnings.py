"""Warnings from the configuration and the home: at the start of `check`, `run` and `up`, and below tables."""

import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sr_assets.adapters.logs import print_warning
from sr_assets.cli.base import echo
from sr_assets.cli.render import age_seconds, age_text, print_note
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: A URL with a login that does not come from the environment.
_LOGIN: Final = re.compile(r"://(?![^/@]*\$\{)[^/@\s]+@")


def warn(settings: "Settings") -> None:
    """Warn about keys without effect, exposed secrets, unused states, and durations that are too short."""
    warn_of_configuration(settings)
    warn_of_home(settings)


def warn_of_configuration(settings: "Settings") -> None:
    """Warn about keys without effect and about exposed secrets."""
    for warning in (
        *settings.warnings,
        *_foreign_configuration(settings),
        *_exposed(settings),
        *_in_clear_text(settings),
        *filter(None, map(settings.unsigned_checkpoints, settings.sites)),
        *filter(None, (feed.unbound_sites for feed in settings.feeds)),
    ):
        print_warning(warning)


def warn_of_home(settings: "Settings") -> None:
    """Warn about what the published tables show: unused states, and durations that are too short."""
    for warning in (*_states_without_entry(settings), *_too_short_durations(settings)):
        print_warning(warning)


def hint(settings: "Settings") -> None:
    """Print a hint for each entry that a native mirror could replace: a full, unchanged copy between linked clusters."""
    for stream in settings.streams:
        if stream.copies_all_unchanged and settings.linked(stream.source, stream.target):
            echo(
                f"hint: {stream.label}: copies all messages unchanged between linked clusters; a native mirror is faster,"
                " but adds no headers and no exactly-once checks in the target (docs/choosing.md)",
                err=True,
            )


def note_age(settings: "Settings") -> None:
    """Print a table's age, and warn about each tracked stream whose node states may be stale.

    They may be stale once the watermark is older than `warn_duration`. The watermark is a time of the source's clock, which
    may differ from this machine's by some seconds.
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
            print_warning(
                f"{label}: its watermark is {watermark:%Y-%m-%d %H:%M:%S} UTC, {duration(age)} old, so node states"
                " may be stale; check that `sr-assets up` or `run` is running, and query `sr-assets lag`"
            )


def _foreign_configuration(settings: "Settings") -> list[str]:
    """Return a warning if another user may change the configuration, which runs commands."""
    from sr_assets.settings.document import foreign_writer, with_folders

    problem = foreign_writer(*with_folders(settings.loaded.path)) if settings.loaded else None
    return (
        [f"{problem}, and thus decides which commands this user runs; own it, and let no group write it"]
        if problem
        else []
    )


def _exposed(settings: "Settings") -> Iterator[str]:
    """Yield a warning for each key file, and for a configuration with secrets, that every user of this machine can read.

    Also for each key and certificate that others can write.
    """
    from sr_assets.adapters.security import exposed_secrets, forgeable_files
    from sr_assets.domain.clusters import ClusterSettings, TlsSettings
    from sr_assets.settings.needed_permissions import used_clusters

    of_sources = [source.cluster for source in settings.data.values() if source.type == "kv"]
    # Consul's files follow the same rule: a cluster that names nothing but them.
    of_sources += [
        ClusterSettings((), tls=TlsSettings(*source.tls.files))
        for source in settings.data.values()
        if source.type == "consul" and source.tls
    ]
    clusters = dict.fromkeys((*used_clusters(settings), *of_sources))
    for file in dict.fromkeys(file for cluster in clusters for file in exposed_secrets(cluster)):
        yield f"{file}: every user of this machine can read this key; chmod it to 0600, or 0640 for a group"
    for file, writer in {
        file: writer for cluster in clusters for file, writer in forgeable_files(cluster).items()
    }.items():
        yield f"{file}: others can replace this key or certificate ({writer}); own it, and chmod it to 0600 or 0644"
    loaded = settings.loaded
    if loaded and _has_secret(loaded.written) and loaded.path.stat().st_mode & stat.S_IROTH:
        yield (
            f"{loaded.path}: every user of this machine can read its passwords; chmod it to 0600, or 0640 for a group, or"
            " take them from the environment with ${NAME}"
        )


def _has_secret(written: object, key: str = "") -> bool:
    """Return whether a file has a password or a token in clear: in a URL, or as the value of a key."""
    if isinstance(written, dict):
        return any(_has_secret(value, str(name).lower()) for name, value in written.items())
    if isinstance(written, list):
        return any(_has_secret(value, key) for value in written)
    text = written if isinstance(written, str) else ""
    return bool(_LOGIN.search(text)) or (key in ("password", "token") and bool(text) and "${" not in text)


def _in_clear_text(settings: "Settings") -> Iterator[str]:
    """Yield a warning for each place to which a login travels unencrypted over a network."""
    from sr_assets.domain.clusters import is_loopback
    from sr_assets.settings.needed_permissions import used_clusters

    def allowed(host: str) -> bool:
        return is_loopback(host) or any(fnmatchcase(host, pattern) for pattern in settings.clear_text_hosts)

    remedy = "or name the host in clear_text_hosts if that network is safe"
    kv = (source.cluster for source in settings.data.values() if source.type == "kv")
    for cluster in dict.fromkeys((*used_clusters(settings), *kv)):
        if cluster.sends_login_in_clear and not all(allowed(server.rpartition(":")[0]) for server in cluster.servers):
            yield f"{cluster.label}: its password or token may travel unencrypted; use tls:// in its URL, {remedy}"
    for name, source in settings.data.items():
        url = urlsplit(source.url or "")
        if source.type == "consul" and source.token and url.scheme == "http" and not allowed(url.hostname or ""):
            yield f"data source {name}: its token travels unencrypted to {url.hostname}; use https://, {remedy}"
    for receiver in settings.notify:
        url = urlsplit(receiver.webhook or "")
        if url.scheme == "http" and not allowed(url.hostname or ""):
            yield f"{receiver.label}: its URL and the messages travel unencrypted; use https://, {remedy}"


def _states_without_entry(settings: "Settings") -> Iterator[str]:
    """Yield a warning for each site and stream in this home that is no longer configured.

    A misspelt or renamed entry starts from an empty state and copies all messages a second time.
    """
    from sr_assets.adapters.home import kept_sites
    from sr_assets.adapters.published.queries import published_streams

    known: dict[str, list[str]] = defaultdict(list)
    try:
        for name, stream in published_streams(settings.home):
            known[name].append(stream)
    except SrAssetsError:
        pass
    for site in kept_sites(settings):
        configured = [entry.stream for entry in settings.sites.get(site, ())]
        remark = " (its rows stay in the tables until then)"
        if not configured:
            yield (
                f"site {site} has a state ({', '.join(known[site]) or 'no stream'}), but no entry has that name; if it was"
                f" renamed, restore the name {site}, or its streams are copied a second time; if it was removed, run"
                f" `sr-assets forget --site {site}`{remark}"
            )
        for stream in sorted(set(known[site]) - set(configured) if configured else ()):
            yield (
                f"stream {site}/{stream} has a state, but no entry names it; if the entry is misspelt, correct it; if it was"
                f" removed, run `sr-assets forget --site {site} --stream {stream}`{remark}"
            )


def _too_short_durations(settings: "Settings") -> list[str]:
    """Return a warning for each tracked stream whose nodes mostly time out and then recover.

    In a tree this happens if the upstream site copies less often than the warning duration.
    """
    from sr_assets.adapters.published.queries import recovery_ages

    try:
        ages = recovery_ages(settings.home)
    except SrAssetsError:
        return []
    return [
        f"{stream.label}: most nodes time out and recover after {duration(ages[stream.label])}; set warn_duration "
        f"({duration(stream.policy.warning_ns / 1e9)}) above the time between their messages in the source"
        for stream in settings.streams
        if stream.policy is not None and stream.label in ages
    ]
