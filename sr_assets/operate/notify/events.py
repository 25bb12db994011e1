"""Which published events one target has not been sent yet, and the file that remembers it.

Per stream: all that was detected before a time is done, and of what was detected since then some events by their id. Not here:
what is said of them (`messages`), sending them (`delivery`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.private import own_folder, write_private
from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.run_failures import read_run_failures
from sr_assets.adapters.state.status_file import read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.operate.notify.messages import Event

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sr_assets.adapters.run_failures import RunFailure
    from sr_assets.settings import NotifySettings, Settings

_SINCE: Final = """
SELECT name || '/' || stream AS label, epoch_us(max(detected_at)) FROM node_advisories GROUP BY ALL
"""
_NEW: Final = """
SELECT event_id, name, stream, event, event_time, detected_at, node, age_seconds, outage_seconds
FROM node_advisories LEFT JOIN (SELECT unnest(?::VARCHAR[]) AS label, unnest(?::BIGINT[]) AS since) AS known
    ON known.label = name || '/' || stream
WHERE epoch_us(detected_at) >= coalesce(since, 0)
ORDER BY detected_at, event_time, node
"""


@dataclass(slots=True)
class Sent:
    """What a target was sent: by stream (`name/stream`) until when, in unix µs, and ids of events since then.

    `failing_since` is when attempts began to fail (unix seconds), None while they succeed.
    """

    since: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    failing_since: float | None = None

    def add(self, events: Iterable[Event]) -> None:
        """Note events as sent, or as not to be sent any more."""
        for event in events:
            self.ids.setdefault(f"{event.name}/{event.stream}", []).append(event.id)


class SentFile:
    """The file that remembers what a target was sent."""

    def __init__(self, home: Path, target: NotifySettings) -> None:
        """Name the target; its name is part of the file's."""
        digest = hashlib.sha256(target.name.encode()).hexdigest()[:16]
        self._file = home / "notify" / f"{digest}.json"
        self.lock = self._file.with_suffix(".lock")

    def load(self) -> Sent | None:
        """Return what was sent; None when nothing is known."""
        try:
            return Sent(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, sent: Sent) -> None:
        """Replace the file."""
        own_folder(self._file.parent)
        known = {"since": sent.since, "ids": sent.ids, "failing_since": sent.failing_since}
        write_private(self._file, json.dumps(known))


def all_sent(settings: Settings) -> Sent:
    """Return where a new target begins: after everything that is published so far."""
    since = _newest(settings)
    ids: dict[str, list[str]] = {}
    for event in _published(settings, since):
        ids.setdefault(f"{event.name}/{event.stream}", []).append(event.id)
    for event in _failures(settings):
        ids.setdefault(f"{event.name}/{event.stream}", []).append(event.id)
    return Sent(since, ids)


def _newest(settings: Settings) -> dict[str, int]:
    try:
        with open_fleet(settings.home) as connection:
            return dict(connection.execute(_SINCE).fetchall())
    except SrAssetsError:
        return {}


def pending(settings: Settings, target: NotifySettings, sent: Sent) -> list[Event]:
    """Return the events that a target is to be sent, in the order in which they were detected.

    `sent` forgets the ids that it needs no more.
    """
    events = [*_published(settings, sent.since), *_failures(settings)]
    waiting: list[Event] = []
    newest = dict(sent.since)
    for event in events:
        label = f"{event.name}/{event.stream}"
        if event.node is not None:
            newest[label] = max(newest.get(label, 0), _us(event.detected_at))
        if event.id not in sent.ids.get(label, ()) and target.wants(event.event, event.name, event.node):
            waiting.append(event)
    _forget(sent, events, {f"{event.name}/{event.stream}" for event in waiting}, newest)
    return waiting


def _forget(sent: Sent, events: list[Event], open_labels: set[str], newest: dict[str, int]) -> None:
    """Let all that is done of a stream be one time, with the ids of that time."""
    kept: dict[str, set[str]] = defaultdict(set)
    for event in events:
        label = f"{event.name}/{event.stream}"
        if event.node is None or _us(event.detected_at) == newest[label]:
            kept[label].add(event.id)
    for label in (newest.keys() | sent.ids.keys()) - open_labels:
        sent.ids[label] = [event_id for event_id in sent.ids.get(label, ()) if event_id in kept[label]]
    sent.since |= {label: at for label, at in newest.items() if label not in open_labels}


def _us(at: datetime) -> int:
    return round(at.timestamp() * 1e6)


def _published(settings: Settings, since: dict[str, int]) -> list[Event]:
    """Return the published transitions of each stream since a time."""
    try:
        with open_fleet(settings.home) as connection:
            rows = connection.execute(_NEW, [list(since), list(since.values())]).fetchall()
    except SrAssetsError:
        return []
    return [Event(*row) for row in rows if row[1] in settings.sites]


def _failures(settings: Settings) -> list[Event]:
    """Return an event for each stream that fails, the same one as long as the failure lasts.

    Its state says so; or, of what stopped whole runs before they could note it, the sensor of failed runs.
    """
    failures = [
        _run_failure(failure, stream)
        for failure in read_run_failures(settings.home).values()
        for stream in failure.streams or ("",)
    ]
    for site in settings.sites:
        status = read_status(settings.home / "sites" / site)
        for stream, known in status.get("streams", {}).items():
            if known.get("last_error"):
                failures.append(_failure(site, stream, known))
    return failures


def _failure(site: str, stream: str, known: dict[str, Any]) -> Event:
    since_ns = known.get("last_error_since_ns") or 0
    return _failed(f"{site}/{stream} {since_ns}", site, stream, since_ns, known["last_error"])


def _run_failure(failure: RunFailure, stream: str) -> Event:
    digested = f"{failure.job} {stream} {failure.since_ns} run"
    return _failed(digested, failure.name, stream, failure.since_ns, f"{failure.reason} (run {failure.run_id})")


def _failed(digested: str, site: str, stream: str, since_ns: int, reason: str) -> Event:
    at = datetime.fromtimestamp(since_ns / 1e9, UTC)
    return Event(hashlib.sha256(digested.encode()).hexdigest()[:32], site, stream, "failed", at, at, reason=reason)
