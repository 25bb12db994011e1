"""Background delivery of notifications: at least once, with retries for a day.

Each target has its own thread, so that a hanging target delays no other. Progress is saved after each message: a crash
repeats at most one, with the same event ids.
"""

import contextlib
import threading
from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.data import current_settings
from sr_assets.adapters.locking import lock
from sr_assets.adapters.logs import print_warning
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import SrAssetsError
from sr_assets.operate.notify.events import Sent, SentFile, all_sent, pending
from sr_assets.operate.notify.messages import Event, Message, messages, summary, withheld
from sr_assets.operate.notify.targets import NotSentError, RefusedError, send
from sr_assets.settings import NotifySettings, Settings
from sr_assets.settings.document import variables_of
from sr_assets.stages.leadership import standby_line

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


def begin_notifying(settings: Settings) -> None:
    """Start each new target at this moment: events published earlier are not sent."""
    for target in settings.notify:
        file = SentFile(settings.home, target)
        if file.load() is None and (sent := all_sent(settings)) is not None:
            file.save(sent)


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
        self._file = SentFile(settings.home, target)
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
        own_folder(self._file.lock.parent)
        with open_private(self._file.lock) as file:
            yield lock(file)

    def _deliver(self) -> bool:
        """Send all pending events; returns False if an attempt failed."""
        sent = self._file.load()
        try:
            if sent is None:
                if (sent := all_sent(self._settings)) is None:
                    return True
                self._file.save(sent)
            before = repr(sent)
            succeeded = self._send(sent, pending(self._settings, self._target, sent))
            if repr(sent) != before:
                self._file.save(sent)
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
            self._file.save(sent)
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
