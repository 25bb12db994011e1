"""Background delivery of published events that a target has not received yet: at least once, with retries for a day.

Each target has its own thread, so that a hanging target delays no other. Progress is saved after each message: a crash
repeats at most one, with the same event ids. Progress per stream is a time, before which all events are done, and the ids of
later events that are done.
"""

import contextlib
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters import control, times
from sr_assets.adapters.data import current_settings
from sr_assets.adapters.locking import lock
from sr_assets.adapters.logs import print_warning
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.run_failures import RunFailure, read_run_failures
from sr_assets.adapters.state.status_file import read_status
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import SrAssetsError
from sr_assets.operate.notify.content import Event, Message, messages, summary, withheld
from sr_assets.operate.notify.targets import NotSentError, RefusedError, send
from sr_assets.settings import NotifySettings, Settings
from sr_assets.settings.document import variables_of
from sr_assets.stages.leadership import standby_line

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
_POLL_SECONDS: Final = 2.0
#: Polling takes at most this share of a core.
_POLL_SHARE: Final = 0.02
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 300.0
#: A pending event is discarded after it has failed for this time.
_GIVE_UP_SECONDS: Final = 86_400.0
#: The window in which `min_nodes` counts distinct nodes.
_TOGETHER: Final = timedelta(minutes=5)
#: Attempts of a single run, and how long its end waits for all targets.
_ATTEMPTS_ONCE: Final = 3
_ONCE_SECONDS: Final = 30.0
#: Refusals in a row after which a message is sent without its details.
_REFUSALS: Final = 3


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


def _key(target: NotifySettings) -> str:
    """Return the key of a target; its name may hold a secret."""
    return hashlib.sha256(target.name.encode()).hexdigest()[:16]


def load_sent(home: Path, target: NotifySettings) -> Sent | None:
    """Return the progress of a target, or None if there is none."""
    for (progress,) in control.query(home, "SELECT progress FROM notified WHERE target = ?", _key(target)):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            saved = json.loads(progress)
            failures = [(at, newest) for at, newest in saved.get("failures", ())]
            held = [_held(values) for values in saved.get("held", ())]
            since, times = saved.get("held_since"), list(saved.get("messages", ()))
            together = dict(saved.get("together", {}))
            return Sent(dict(saved["since"]), dict(saved["ids"]), failures, held, since, times, together)
    return None


def save_sent(home: Path, target: NotifySettings, sent: Sent) -> None:
    """Store the progress of a target."""
    progress = json.dumps(asdict(sent), default=datetime.isoformat)
    control.change(home, "INSERT OR REPLACE INTO notified VALUES (?, ?)", _key(target), progress)


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
        for stream, status in read_status(settings.home / "sites" / site).streams.items():
            if status.last_error:
                since_ns = status.last_error_since_ns or 0
                failures.append(_failed(f"{site}/{stream} {since_ns}", site, stream, since_ns, status.last_error))
    return failures


def _run_failure(failure: RunFailure, stream: str) -> Event:
    digested = f"{failure.job} {stream} {failure.since_ns} run"
    return _failed(digested, failure.name, stream, failure.since_ns, f"{failure.reason} (run {failure.run_id})")


def _failed(digested: str, site: str, stream: str, since_ns: int, reason: str) -> Event:
    at = datetime.fromtimestamp(since_ns / 1e9, UTC)
    return Event(hashlib.sha256(digested.encode()).hexdigest()[:32], site, stream, "failed", at, at, reason=reason)


def begin_notifying(settings: Settings) -> None:
    """Start each new target at this moment: events published earlier are not sent."""
    for target in settings.notify:
        if load_sent(settings.home, target) is None and (sent := all_sent(settings)) is not None:
            save_sent(settings.home, target, sent)


@contextlib.contextmanager
def notify_beside(settings: Settings) -> Iterator[None]:
    """Deliver new events in the background inside the block; its end does not wait for a hanging target."""
    begin_notifying(settings)
    with contextlib.ExitStack() as threads:
        for target in settings.notify:
            deliver = _Delivery(settings, target).deliver_on
            threads.enter_context(BackgroundThread(target.label, deliver, join_seconds=0.0))
        yield


def notify_once(settings: Settings) -> None:
    """Deliver all published events; the next run retries those that fail after a few attempts."""
    deadline = times.monotonic() + _ONCE_SECONDS
    threads = [
        threading.Thread(target=_Delivery(settings, target).deliver_once, name=target.label, daemon=True)
        for target in settings.notify
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - times.monotonic()))


class _Delivery:
    """Deliveries to one target by this process, unless another process holds the target's lock."""

    def __init__(self, settings: Settings, target: NotifySettings) -> None:
        self._settings, self._target = settings, target
        # Those with the passwords of the configuration.
        self._hidden = variables_of(settings.loaded.written) if settings.loaded else ()
        self._failures = 0

    def deliver_on(self) -> Generator[float]:
        """Deliver new events."""
        while True:
            started = times.monotonic()
            self._read_dynamic()
            # Lock for each attempt: another process, such as a single run, may release it at any time.
            with self._locked() as locked:
                succeeded = not locked or self._deliver()
            if succeeded:
                yield max(_POLL_SECONDS, (times.monotonic() - started) / _POLL_SHARE)
            else:
                yield _pause_seconds(self._failures)

    def _read_dynamic(self) -> None:
        self._settings = current_settings(self._settings)
        self._target = next((each for each in self._settings.notify if each.name == self._target.name), self._target)

    def deliver_once(self) -> None:
        """Deliver all pending events in a few attempts."""
        with self._locked() as locked:
            for attempt in range(_ATTEMPTS_ONCE if locked else 0):
                if attempt:
                    times.sleep(_pause_seconds(self._failures))
                if self._deliver():
                    return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yield True while holding the target's lock, or False if another process delivers to it."""
        folder = self._settings.home / "notify"
        own_folder(folder)
        with open_private(folder / f"{_key(self._target)}.lock") as file:
            yield lock(file)

    def _deliver(self) -> bool:
        """Send all pending events; returns False if an attempt failed."""
        try:
            sent = load_sent(self._settings.home, self._target)
            if sent is None:
                if (sent := all_sent(self._settings)) is None:
                    return True
                save_sent(self._settings.home, self._target, sent)
            before = repr(sent)
            succeeded = self._send(sent, pending(self._settings, self._target, sent))
            if repr(sent) != before:
                save_sent(self._settings.home, self._target, sent)
        except (OSError, SrAssetsError) as error:
            print_warning(f"{self._target.label}: {error}")
            self._failures += 1
            return False
        return succeeded

    def _apply_min_nodes(self, sent: Sent, waiting: list[Event]) -> list[Event]:
        """Omit node events below `min_nodes`, and discard them after the window has passed.

        Nodes that have reached the number count for the rest of their window.
        """
        few = [event for event in waiting if event.node is not None]
        begin = datetime.fromtimestamp(times.time(), UTC) - _TOGETHER
        sent.together = {node: at for node, at in sent.together.items() if at >= begin.timestamp()}
        nodes = {f"{event.name}/{event.node}": event.detected_at.timestamp() for event in few}
        if len(nodes.keys() | sent.together.keys()) >= self._target.min_nodes:
            sent.together |= nodes if self._target.min_nodes > 1 else {}
            return waiting
        sent.add(event for event in few if event.detected_at < begin)
        return [event for event in waiting if event.node is None]

    def _send(self, sent: Sent, waiting: list[Event]) -> bool:
        held = {event.id for event in sent.held}
        fresh = self._leave_to_leader(sent, [event for event in waiting if event.id not in held])
        fresh = self._apply_min_nodes(sent, fresh)
        for message in self._messages(sent, fresh):
            if self._must_wait(sent):
                done = {event_id for ids in sent.ids.values() for event_id in ids}
                sent.hold((event for event in fresh if event.id not in done), times.time())
                break
            try:
                self._send_message(message)
            except NotSentError as error:
                self._note_failure(sent, [*sent.held, *fresh], str(error))
                return False
            sent.add(message.events)
            sent.messages.append(times.time())
            save_sent(self._settings.home, self._target, sent)
        sent.failures.clear()
        self._failures = 0
        return True

    def _send_message(self, message: Message) -> None:
        """Send a message; one that the receiver refuses again and again without the names and reasons in it.

        Otherwise a node's name that a receiver refuses would hold up all later events. A receiver that refuses both has
        another problem, so that everything is retried.
        """
        try:
            send(self._target, message, self._hidden)
        except RefusedError as error:
            if self._failures + 1 < _REFUSALS:
                raise
            send(self._target, withheld(message), self._hidden)
            print_warning(f"{self._target.label}: {error}; sent {len(message.events)} events without names and reasons")

    def _leave_to_leader(self, sent: Sent, waiting: list[Event]) -> list[Event]:
        """Omit the events of sites that another member leads, which sends them, unless this home has failed to send."""
        sites = self._settings.sites.keys() & {event.name for event in waiting}
        followed = {site for site in sites if standby_line(self._settings, site) is not None}
        if not followed or sent.failures:
            return waiting
        sent.add(event for event in waiting if event.name in followed)
        return [event for event in waiting if event.name not in followed]

    def _messages(self, sent: Sent, fresh: list[Event]) -> list[Message]:
        """Return the messages about fresh events, or one summary if any event was held back."""
        quiet = [event.detected_at.timestamp() for event in fresh if self._target.is_quiet(event.detected_at)]
        if not sent.held and not quiet:
            return messages(fresh, together=self._target.min_nodes > 1)
        since = min([*quiet, *([] if sent.held_since is None else [sent.held_since])])
        return [summary([*sent.held, *fresh], since)]

    def _must_wait(self, sent: Sent) -> bool:
        """Return whether quiet hours or the limit permit no message now, and forget the messages that no longer count."""
        now, limit = times.time(), self._target.rate_limit
        since = now - limit.within_ns / 1e9 if limit else now
        # A clock that was set back must not limit for longer.
        sent.messages = [at for at in sent.messages if since < at <= now]
        return self._target.is_quiet(datetime.fromtimestamp(now, UTC)) or (
            limit is not None and len(sent.messages) >= limit.messages
        )

    def _note_failure(self, sent: Sent, waiting: list[Event], reason: str) -> None:
        """Warn about the first failure in a row, and discard events that have failed for a day."""
        now = times.time()
        waiting = [event for event in waiting if event.id not in sent.ids.get(f"{event.name}/{event.stream}", ())]
        sent.note_failure(waiting, now)
        self._failures += 1
        if self._failures == 1:
            print_warning(f"{self._target.label}: {reason}; {len(waiting)} events are pending and will be retried")
        if expired := sent.failing_since(waiting, now - _GIVE_UP_SECONDS):
            print_warning(f"{self._target.label}: {reason}, for a day; discarded {len(expired)} events")
            sent.add(expired)


def _pause_seconds(failures: int) -> float:
    return backoff_seconds(max(1, failures), first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS)
