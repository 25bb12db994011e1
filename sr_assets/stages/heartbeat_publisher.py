"""Publishing the heartbeats of the block `heartbeats`: by `up` and `run --follow`, as long as they go on.

A heartbeat climbs a tree of replicators as every message does, so its readers know that the path is alive. Not here: the
site's own heartbeat about its nodes (`tracking.heartbeat`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.errors import SrAssetsError, TransientError
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.heartbeats import ORIGINATOR, SUBJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sr_assets.settings.heartbeats import HeartbeatSettings, HeartbeatSubject

_CLIENT: Final = "sr-assets heartbeats"
#: How often a failure that goes on is said again.
_SAY_AGAIN_SECONDS: Final = 60.0


class HeartbeatPublisher:
    """Publishes heartbeats from `with` to its end, each subject's at its interval, in a thread of its own.

    A heartbeat that no stream acknowledges is an error, which `say` gets in one line: at once, once a minute while it goes
    on, and when it has ended. Nothing is sent later for what could not be sent.
    """

    def __init__(self, settings: HeartbeatSettings | None, say: Callable[[str], None]) -> None:
        """Take the block, None when there is none, and where lines go."""
        self._settings, self._say = settings, say
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._said: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._settings is not None:
            self._thread = threading.Thread(target=self._beat, args=(self._settings,), name=_CLIENT, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _beat(self, settings: HeartbeatSettings) -> None:
        due = dict.fromkeys(settings.subjects, time.monotonic())
        with contextlib.closing(Cluster(settings.cluster, _CLIENT)) as cluster:
            while not self._ended.wait(max(0.0, min(due.values()) - time.monotonic())):
                now = time.monotonic()
                for subject in [subject for subject, at in due.items() if at <= now]:
                    self._publish(cluster, subject)
                    interval_seconds = subject.interval_ns / SECOND_NS
                    due[subject] = max(due[subject] + interval_seconds, time.monotonic())

    def _publish(self, cluster: Cluster, subject: HeartbeatSubject) -> None:
        try:
            publish_heartbeat(cluster, subject)
        except SrAssetsError as error:
            if isinstance(error, TransientError):
                cluster.close()
            if time.monotonic() - self._said.get(subject.subject, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
                self._said[subject.subject] = time.monotonic()
                self._say(f"heartbeat {subject.subject}: {error}")
        else:
            if self._said.pop(subject.subject, None) is not None:
                self._say(f"heartbeat {subject.subject}: is stored again")


def publish_heartbeat(cluster: Cluster, subject: HeartbeatSubject) -> None:
    """Publish one heartbeat, as the Stream Replicator's; raises RunError unless a stream acknowledges it."""
    headers = {**dict(subject.headers), ORIGINATOR: socket.gethostname(), SUBJECT: subject.subject}
    cluster.publish(subject.subject, b"%d" % time.time(), headers)


def try_heartbeats(settings: HeartbeatSettings | None) -> Iterator[tuple[str, str, str | None]]:
    """Yield for each subject the cluster, what was tried and the failure, None without one; nothing is stored."""
    if settings is None:
        return
    with contextlib.closing(Cluster(settings.cluster, "sr-assets check")) as cluster:
        for subject in settings.subjects:
            failure = None
            try:
                cluster.try_publishing(subject.subject)
            except SrAssetsError as error:
                failure = str(error)
            yield settings.cluster.label, f"publish {subject.subject}", failure
