"""Delivering notifications beside everything else: at least once, again after a failure, and given up after a day.

Each target has a thread of its own, so that one that hangs delays nobody. What was sent is written down after each message: a
crash repeats one at most, with the same event ids. Not here: an attempt (`targets`), what is to be sent (`events`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import SrAssetsError
from sr_assets.operate.notify.events import SentFile, all_sent, pending
from sr_assets.operate.notify.messages import messages
from sr_assets.operate.notify.targets import NotSentError, send
from sr_assets.operate.report import print_warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.operate.notify.events import Sent
    from sr_assets.operate.notify.messages import Event
    from sr_assets.settings import NotifySettings, Settings

_LOOK_SECONDS: Final = 2.0
#: Looking takes at most this share of a core.
_LOOK_SHARE: Final = 0.02
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 300.0
#: After so long without a success what waits is given up.
_GIVE_UP_SECONDS: Final = 86_400.0
#: Events that come within this are counted together for `min_nodes`.
_TOGETHER: Final = timedelta(minutes=5)
#: How often a single run tries, and how long its end waits for all targets.
_ATTEMPTS_ONCE: Final = 3
_ONCE_SECONDS: Final = 30.0


def begin_notifying(settings: Settings) -> None:
    """Let each new target begin now: it gets nothing of what was published before."""
    for target in settings.notify:
        file = SentFile(settings.home, target)
        if file.load() is None:
            file.save(all_sent(settings))


@contextlib.contextmanager
def notify_beside(settings: Settings) -> Iterator[None]:
    """Deliver what is published, as it is, until the end of `with`, which does not wait for a target that hangs."""
    begin_notifying(settings)
    ended = threading.Event()
    for target in settings.notify:
        _start(_Delivery(settings, target).go_on, target, ended)
    try:
        yield
    finally:
        ended.set()


def notify_once(settings: Settings) -> None:
    """Deliver what is published by now; what cannot be sent in a few attempts is left to the next run."""
    deadline = time.monotonic() + _ONCE_SECONDS
    threads = [_start(_Delivery(settings, target).try_now, target, threading.Event()) for target in settings.notify]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _start(work: object, target: NotifySettings, ended: threading.Event) -> threading.Thread:
    assert callable(work)
    thread = threading.Thread(target=work, args=(ended,), name=target.label, daemon=True)
    thread.start()
    return thread


class _Delivery:
    """The deliveries to one target by this process, unless another one makes them."""

    def __init__(self, settings: Settings, target: NotifySettings) -> None:
        self._settings, self._target = settings, target
        self._file = SentFile(settings.home, target)
        self._failures = 0

    def go_on(self, ended: threading.Event) -> None:
        """Deliver until the end."""
        pause_seconds = 0.0
        while not ended.wait(pause_seconds):
            # Another process, a single run say, may be about to end.
            with self._alone() as alone:
                started = time.monotonic()
                well = not alone or self._deliver()
            if well:
                pause_seconds = max(_LOOK_SECONDS, (time.monotonic() - started) / _LOOK_SHARE)
            else:
                pause_seconds = _pause_seconds(self._failures)

    def try_now(self, ended: threading.Event) -> None:
        """Deliver what there is, in a few attempts."""
        with self._alone() as alone:
            for attempt in range(_ATTEMPTS_ONCE if alone else 0):
                if ended.wait(_pause_seconds(self._failures) if attempt else 0.0) or self._deliver():
                    return

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield whether no other process delivers to the target."""
        own_folder(self._file.lock.parent)
        with open_private(self._file.lock) as file:
            yield lock(file)

    def _deliver(self) -> bool:
        """Send what waits; returns whether nothing waits any more."""
        sent = self._file.load()
        try:
            if sent is None:
                self._file.save(sent := all_sent(self._settings))
            before = repr(sent)
            waiting = self._enough(sent, pending(self._settings, self._target, sent))
            well = self._send(sent, waiting)
            if repr(sent) != before:
                self._file.save(sent)
        except (OSError, SrAssetsError) as error:
            print_warning(f"{self._target.label}: {error}")
            self._failures += 1
            return False
        return well

    def _enough(self, sent: Sent, waiting: list[Event]) -> list[Event]:
        """Return what is worth a notification; too few nodes are forgotten after a while."""
        nodes = {(event.name, event.node) for event in waiting if event.node is not None}
        if len(nodes) >= self._target.min_nodes:
            return waiting
        few = [event for event in waiting if event.node is not None]
        sent.add(event for event in few if event.detected_at < datetime.fromtimestamp(time.time(), UTC) - _TOGETHER)
        return [event for event in waiting if event.node is None]

    def _send(self, sent: Sent, waiting: list[Event]) -> bool:
        for message in messages(waiting, together=self._target.min_nodes > 1):
            try:
                send(self._target, message)
            except NotSentError as error:
                self._note_failure(sent, waiting, str(error))
                return False
            sent.add(message.events)
            sent.failing_since = None
            self._file.save(sent)
        self._failures = 0
        return True

    def _note_failure(self, sent: Sent, waiting: list[Event], reason: str) -> None:
        """Say once that a target fails, and give up what waits after a day."""
        now = time.time()
        sent.failing_since = sent.failing_since or now
        self._failures += 1
        if self._failures == 1:
            print_warning(f"{self._target.label}: {reason}; {len(waiting)} events wait and are sent again")
        if now - sent.failing_since > _GIVE_UP_SECONDS:
            print_warning(f"{self._target.label}: {reason}, for a day: {len(waiting)} events are given up")
            sent.add(waiting)
            sent.failing_since = None


def _pause_seconds(failures: int) -> float:
    return backoff_seconds(max(1, failures), first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS)
