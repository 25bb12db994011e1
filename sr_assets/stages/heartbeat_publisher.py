"""The publisher of the block `heartbeats`, in `up` and `run --follow`.

A heartbeat climbs a tree of replicators like every message, so its readers know that the path is alive.
"""

import contextlib
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, Self

from sr_assets.adapters import control, times
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.state.heartbeat_counts import HeartbeatCounts, write_counts
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.election_keys import heartbeats_key, heartbeats_site
from sr_assets.domain.errors import RunError, SrAssetsError, TransientError
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings import HeartbeatSettings, HeartbeatSubject, Settings
from sr_assets.settings.heartbeats import ORIGINATOR, SUBJECT
from sr_assets.stages.campaign import Key
from sr_assets.stages.leadership import Leadership

_CLIENT: Final = "sr-assets heartbeats"
#: Interval of the log lines about a persistent failure.
_SAY_AGAIN_SECONDS: Final = 60.0


class HeartbeatPublisher:
    """Publishes heartbeats inside `with`, each subject's at its interval, in a separate thread.

    If no stream acknowledges a heartbeat, `say` gets one line: immediately, once a minute while the failure lasts, and
    at its end. Missed heartbeats are not sent later. With `leadership`, it campaigns, and publishes while it leads;
    entering raises RunError for an unusable bucket.
    """

    def __init__(
        self,
        settings: HeartbeatSettings | None,
        say: Callable[[str], None],
        leadership: Leadership | None = None,
        folder: Path | None = None,
    ) -> None:
        """Count in `folder`, if given, for metrics."""
        self._settings, self._say, self._leadership, self._folder = settings, say, leadership, folder
        self._counts = HeartbeatCounts.read(folder) if folder else {}
        self._ended = False
        self._thread: BackgroundThread | None = None
        self._said: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._settings is not None:
            if self._leadership is not None:
                self._leadership.begin()
            if self._folder is not None:
                control.end_upgrade(self._folder)
            block = self._settings
            self._thread = BackgroundThread("heartbeats", lambda: self._beat(block))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._thread is not None:
            self._thread.stop(1.0)
        if self._leadership is not None:
            self._leadership.__exit__(None, None, None)

    def _beat(self, settings: HeartbeatSettings) -> Generator[float]:
        due = dict.fromkeys(settings.subjects, times.monotonic())
        with contextlib.closing(Cluster(settings.cluster, _CLIENT)) as cluster:
            while True:
                yield max(0.0, min(due.values()) - times.monotonic())
                now = times.monotonic()
                for subject in [subject for subject, at in due.items() if at <= now]:
                    if self._may_publish():
                        self._publish(cluster, subject)
                    interval_seconds = subject.interval_ns / SECOND_NS
                    due[subject] = max(due[subject] + interval_seconds, times.monotonic())
                if self._folder:
                    with contextlib.suppress(RunError):  # heartbeats matter more
                        write_counts(self._folder, self._counts)

    def _may_publish(self) -> bool:
        if self._leadership is None:
            return True
        if self._ended:
            return False
        try:
            # The process of this home that campaigned may have ended.
            self._leadership.begin()
        except RunError as error:
            self._say(f"heartbeats: {error}")
        return self._leadership.campaigns and self._leadership.leads

    def _publish(self, cluster: Cluster, subject: HeartbeatSubject) -> None:
        counts, started = self._counts.setdefault(subject.subject, HeartbeatCounts()), times.monotonic()
        counts.published += 1
        try:
            publish_heartbeat(cluster, subject)
        except SrAssetsError as error:
            counts.errors += 1
            if isinstance(error, TransientError):
                cluster.close()
            if times.monotonic() - self._said.get(subject.subject, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
                self._said[subject.subject] = times.monotonic()
                self._say(f"heartbeat {subject.subject}: {error}")
        else:
            if self._said.pop(subject.subject, None) is not None:
                self._say(f"heartbeat {subject.subject}: stored again")
        counts.seconds += times.monotonic() - started


def publisher_of(settings: Settings, say: Callable[[str], None]) -> HeartbeatPublisher:
    """Return the publisher of a configuration's heartbeats."""
    folder = settings.home / "sites" / heartbeats_site(settings.replicator)
    return HeartbeatPublisher(settings.heartbeats, say, heartbeat_leadership(settings), folder)


def heartbeat_leadership(settings: Settings) -> Leadership | None:
    """Return this home's part in the election of the heartbeats' publisher, or None without one."""
    block = settings.heartbeats
    if block is None or not block.leader_election:
        return None
    where = settings.heartbeat_election_cluster(block)
    key = Key(heartbeats_key(settings.replicator), socket.gethostname(), where, settings.leader_election.bucket)
    return Leadership(settings, heartbeats_site(settings.replicator), patient=True, keys=[key])


def publish_heartbeat(cluster: Cluster, subject: HeartbeatSubject) -> None:
    """Publish one heartbeat in the Stream Replicator's format; raises RunError unless a stream acknowledges it."""
    headers = {**dict(subject.headers), ORIGINATOR: socket.gethostname(), SUBJECT: subject.subject}
    cluster.publish(subject.subject, b"%d" % times.time(), headers)
