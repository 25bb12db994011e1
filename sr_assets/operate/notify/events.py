"""Published events that a target has not received yet, and the file that records its progress.

Progress per stream is a time, before which all events are done, and the ids of later events that are done.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.private import own_folder, write_private
from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.run_failures import RunFailure, read_run_failures
from sr_assets.adapters.state.status_file import read_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.operate.notify.messages import Event
from sr_assets.settings import NotifySettings, Settings

#: The minimum time between two recorded failures.
_FAILURE_SECONDS: Final = 3_600.0
_SINCE: Final = """
SELECT name || '/' || stream AS label, epoch_us(max(found_at)) FROM (
    SELECT name, stream, announced_at AS found_at FROM node_advisories
    UNION ALL SELECT name, stream, detected_at FROM site_events
    UNION ALL SELECT name, stream, detected_at FROM node_events
) WHERE found_at IS NOT NULL GROUP BY ALL
"""
_NEW: Final = """
SELECT event_id, name, stream, event, event_time, found_at, node, age_seconds, outage_seconds, reason, class FROM (
    SELECT event_id, name, stream, event, event_time, announced_at AS found_at, node, age_seconds, outage_seconds,
        NULL AS reason, class FROM node_advisories
    UNION ALL SELECT event_id, name, stream, event, event_time, detected_at, NULL, NULL, NULL,
        silent || ' of ' || nodes || ' nodes are silent', NULL FROM site_events
    UNION ALL SELECT event_id, name, stream, event, event_time, detected_at, node, NULL, NULL,
        transitions || ' transitions', NULL FROM node_events WHERE event <> 'unretired'
) LEFT JOIN (SELECT unnest(?::VARCHAR[]) AS label, unnest(?::BIGINT[]) AS since) AS known
    ON known.label = name || '/' || stream
WHERE epoch_us(found_at) >= coalesce(since, 0)
ORDER BY found_at, event_time, node
"""
#: Only flapping nodes need it, so it is seldom run.
_CLASSES: Final = "SELECT name, stream, node, class FROM node_availability WHERE node IN (SELECT unnest(?::VARCHAR[]))"


@dataclass(slots=True)
class Sent:
    """A target's progress: by stream (`name/stream`) a time in unix µs, and the ids of sent events since then.

    Each of `failures` is the time of a failed attempt (unix seconds) and the newest detection time among the events that
    were pending then (unix µs): those events have failed at least since then. `held` are the events that quiet hours or
    the limit hold back since `held_since`, `messages` the times of the last sent messages (both in unix seconds).
    `together` maps the nodes (`name/node`) that have reached `min_nodes` to the time of their last event (unix seconds).
    """

    since: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    failures: list[tuple[float, int]] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    held_since: float | None = None
    messages: list[float] = field(default_factory=list)
    together: dict[str, float] = field(default_factory=dict)

    def hold(self, events: Iterable[Event], at: float) -> None:
        """Keep events for the next summary; a failure before that says nothing about the receiver then."""
        held = {event.id for event in self.held}
        self.held += [event for event in events if event.id not in held]
        if self.held and self.held_since is None:
            self.held_since = at
        self.failures.clear()

    def note_failure(self, pending: Sequence[Event], at: float) -> None:
        """Record a failed attempt, at most one per hour, and forget the failures of events that are done."""
        detected = [unix_us(event.detected_at) for event in pending]
        self.failures = [(failed_at, newest) for failed_at, newest in self.failures if newest >= min(detected)]
        last_at, last_newest = self.failures[-1] if self.failures else (0.0, 0)
        if max(detected) > last_newest and at - last_at >= _FAILURE_SECONDS:
            self.failures.append((at, max(detected)))

    def failing_since(self, pending: Sequence[Event], at: float) -> list[Event]:
        """Return the pending events that have failed since a time (unix seconds) or earlier."""
        newest = max((newest for failed_at, newest in self.failures if failed_at <= at), default=None)
        return [event for event in pending if newest is not None and unix_us(event.detected_at) <= newest]

    def add(self, events: Iterable[Event]) -> None:
        """Mark events as done: sent or discarded."""
        done = set()
        for event in events:
            self.ids.setdefault(f"{event.name}/{event.stream}", []).append(event.id)
            done.add(event.id)
        self.held = [event for event in self.held if event.id not in done]
        if not self.held:
            self.held_since = None


class SentFile:
    """The file with a target's progress."""

    def __init__(self, home: Path, target: NotifySettings) -> None:
        digest = hashlib.sha256(target.name.encode()).hexdigest()[:16]
        self._file = home / "notify" / f"{digest}.json"
        self.lock = self._file.with_suffix(".lock")

    def load(self) -> Sent | None:
        """Return the progress, or None if the file is missing or unreadable."""
        try:
            saved = json.loads(self._file.read_text())
            failures = [(at, newest) for at, newest in saved.get("failures", ())]
            held = [_held(values) for values in saved.get("held", ())]
            since, times = saved.get("held_since"), list(saved.get("messages", ()))
            together = dict(saved.get("together", {}))
            return Sent(dict(saved["since"]), dict(saved["ids"]), failures, held, since, times, together)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def save(self, sent: Sent) -> None:
        """Replace the file."""
        own_folder(self._file.parent)
        write_private(self._file, json.dumps(asdict(sent), default=datetime.isoformat))


def _held(values: dict[str, Any]) -> Event:
    times = {name: datetime.fromisoformat(values[name]) for name in ("at", "detected_at")}
    return Event(**{**values, **times})


def all_sent(settings: Settings) -> Sent | None:
    """Return the progress of a new target: all events published so far count as done. None if they cannot be read now."""
    sent = Sent()
    if (settings.home / "fleet.duckdb").exists():
        newest = _newest(settings)
        published = None if newest is None else _published(settings, newest)
        if newest is None or published is None:
            return None
        sent.since = newest
        sent.add(published)
    sent.add(_failures(settings))
    return sent


def _newest(settings: Settings) -> dict[str, int] | None:
    try:
        with open_fleet(settings.home) as connection:
            return dict(connection.execute(_SINCE).fetchall())
    except SrAssetsError:
        return None


def pending(settings: Settings, target: NotifySettings, sent: Sent) -> list[Event]:
    """Return a target's pending events in the order of detection, and drop ids that `sent` no longer needs."""
    published = _published(settings, sent.since)
    events = [*(event for event in published or () if event.name in settings.sites), *_failures(settings)]
    waiting: list[Event] = []
    newest = dict(sent.since)
    for event in events:
        label = f"{event.name}/{event.stream}"
        if event.event != "failed":
            newest[label] = max(newest.get(label, 0), unix_us(event.detected_at))
        if event.id not in sent.ids.get(label, ()) and target.wants(event.event, event.name, event.node):
            waiting.append(event)
    if published is not None:
        # The events of a site that is not configured now may be back later.
        absent = {label for label in sent.ids if not _is_read(label, settings)}
        _forget(sent, events, {f"{event.name}/{event.stream}" for event in waiting} | absent, newest)
    return waiting


def _is_read(label: str, settings: Settings) -> bool:
    site, _, stream = label.partition("/")
    return site in settings.sites or not stream


def _forget(sent: Sent, events: list[Event], open_labels: set[str], newest: dict[str, int]) -> None:
    """Advance the time of each stream without pending events, and keep only the ids at that time."""
    needed: dict[str, set[str]] = defaultdict(set)
    for event in events:
        label = f"{event.name}/{event.stream}"
        if event.event == "failed" or unix_us(event.detected_at) == newest[label]:
            needed[label].add(event.id)
    for label in (newest.keys() | sent.ids.keys()) - open_labels:
        sent.ids[label] = [event_id for event_id in sent.ids.get(label, ()) if event_id in needed[label]]
    sent.since |= {label: at for label, at in newest.items() if label not in open_labels}


def unix_us(at: datetime) -> int:
    """Return a time in unix µs."""
    return round(at.timestamp() * 1e6)


def _published(settings: Settings, since: dict[str, int]) -> list[Event] | None:
    """Return the published transitions of each stream since a time, or None if they cannot be read now."""
    try:
        with open_fleet(settings.home) as connection:
            rows = connection.execute(_NEW, [list(since), list(since.values())]).fetchall()
            events = [Event(*row) for row in rows]
            flapping = [event.node for event in events if event.event in ("flapping", "settled")]
            classes = connection.execute(_CLASSES, [flapping]).fetchall() if flapping else []
    except SrAssetsError:
        return None
    known = {(name, stream, node): node_class for name, stream, node, node_class in classes}
    return [
        replace(event, node_class=event.node_class or known.get((event.name, event.stream, event.node)))
        for event in events
    ]


def _failures(settings: Settings) -> list[Event]:
    """Return an event for each failing stream; its id stays the same while the failure lasts.

    A stream's failure is in its state. The run failure sensor records failures that stop whole runs before that.
    """
    failures = [
        _run_failure(failure, stream)
        for failure in read_run_failures(settings.home).values()
        for stream in failure.streams or ("",)
    ]
    for site in settings.sites:
        status = read_status(settings.home / "sites" / site)
        for stream, numbers in status.get("streams", {}).items():
            if reason := numbers.get("last_error"):
                since_ns = numbers.get("last_error_since_ns") or 0
                failures.append(_failed(f"{site}/{stream} {since_ns}", site, stream, since_ns, reason))
    return failures


def _run_failure(failure: RunFailure, stream: str) -> Event:
    digested = f"{failure.job} {stream} {failure.since_ns} run"
    return _failed(digested, failure.name, stream, failure.since_ns, f"{failure.reason} (run {failure.run_id})")


def _failed(digested: str, site: str, stream: str, since_ns: int, reason: str) -> Event:
    at = datetime.fromtimestamp(since_ns / 1e9, UTC)
    return Event(hashlib.sha256(digested.encode()).hexdigest()[:32], site, stream, "failed", at, at, reason=reason)
