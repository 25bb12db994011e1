"""A site's status for readers without its lock; the last idle poll, and the last progress of a process.

The latter two are files whose time is their content: they also work on a full disk.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from sr_assets.adapters import control, times
from sr_assets.adapters.threads import Failure, failing_threads
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from sr_assets.settings import Entry

_IDLE_POLL: Final = "looked"
_ALIVE: Final = "alive"
_STATE_FILE: Final = "state.duckdb"


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """The status of a stream or feed at a commit of its site; times are in unix ns, durations in ns.

    `published.stream_status` derives it from the state; `stages.site` adds `last_success_ns` and `refused_since_ns`, which
    no table has. It is a row of the published tables `replication` and `site_summary`, and a part of `SiteStatus`, from which
    sensors, commands, metrics, `/readyz` and notifications read it.

    `spark_messages` were read or copied by Spark's tasks, `local_messages` by the runs' own processes; a message that is
    read and copied counts twice. `lost_messages` belong to `seen_messages` but not to `gap_messages`. `deadline_ns` is the
    earliest deadline of a node, `next_deadline_ns` the earliest time at which a run has work without a new message.
    `target_sequence` is how far the target is known, None before this field existed. `queued` copies are not in the target
    yet. `last_error` stopped reading or copying, `copy_error` only draining the queue. `refused_since_ns` is the time of
    the oldest advisory if the last run's were refused. `last_success_ns`: no work was left. `paused`: the tables show that
    copying is paused. `counters` are those of `Counter`, by label.
    """

    target_stream: str | None = None
    tracked: bool = False
    paused: bool = False
    created_ns: int = 0
    next_sequence: int = 0
    source_last_sequence: int = 0
    lag_messages: int = 0
    lag_ns: int = 0
    watermark_ns: int | None = None
    as_of_ns: int | None = None
    starts: int = 0
    seen_messages: int = 0
    skipped_messages: int = 0
    too_old_messages: int = 0
    no_sender_messages: int = 0
    gap_messages: int = 0
    late_sightings: int = 0
    copied_messages: int = 0
    spark_messages: int = 0
    local_messages: int = 0
    copied_bytes: int = 0
    parked_messages: int = 0
    lost_messages: int = 0
    queued: int = 0
    target_created_ns: int = 0
    target_sequence: int | None = None
    unpublished: int = 0
    unpublished_events: int = 0
    refused_since_ns: int | None = None
    last_error: str | None = None
    last_error_since_ns: int | None = None
    copy_error: str | None = None
    copy_error_since_ns: int | None = None
    last_success_ns: int | None = None
    deadline_ns: int | None = None
    next_deadline_ns: int | None = None
    up: int = 0
    timeout: int = 0
    retired: int = 0
    new_24h: int = 0
    blind_ns: int = 0
    outage: str | None = None
    outage_ns: int | None = None
    p50_seconds: float | None = None
    p95_seconds: float | None = None
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Read a stream's part of a site's status; another version may have omitted a key, or added one."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})

    @property
    def begun(self) -> bool:
        """Whether the stream has a position."""
        return self.created_ns != 0


@dataclass(frozen=True, slots=True)
class SiteStatus:
    """The status of a site's streams and feeds at its last commit, at `committed_at_ns` of the servers' time.

    `configuration` is the digest of the settings. `failed` is that of the native streams' last run. `written_at` holds the
    monotonic time in seconds and the id of the machine's boot; without it, a command has changed or replaced the state since:
    a run is due. `exists` is False before the first run.
    """

    streams: Mapping[str, StreamStatus] = field(default_factory=dict)
    configuration: str = ""
    committed_at_ns: int = 0
    failed: bool = False
    written_at: tuple[float, str] | None = None
    exists: bool = True

    def of(self, stream: str) -> StreamStatus:
        """Return the status of a stream or feed, an empty one before its first commit."""
        return self.streams.get(stream, _UNKNOWN)

    @property
    def is_outdated(self) -> bool:
        """Whether a command has changed the state after this status was written."""
        return self.exists and self.written_at is None

    @property
    def age_seconds(self) -> float | None:
        """The age, independent of changes of the time of day; None if another machine or an earlier boot wrote it."""
        seconds, boot = self.written_at or (math.inf, "")
        age_seconds = times.monotonic() - seconds
        return age_seconds if boot == times.boot_id() and age_seconds >= 0 else None


_UNKNOWN: Final = StreamStatus()
#: The last read status of each site's folder, with its text: readers ask often, and it changes seldom.
_read: Final[dict[Path, tuple[str, SiteStatus]]] = {}


def read_status(folder: Path) -> SiteStatus:
    """Return a site's status; an empty one before the first run, or if the folder was deleted.

    It is the same object until the status changes.
    """
    home, site = control.place_of(folder)
    rows = control.query(home, "SELECT status FROM site_status WHERE site = ? AND status IS NOT NULL", site)
    if not rows or not folder.is_dir():
        return SiteStatus(exists=False)
    ((text,),) = rows
    known = _read.get(folder)
    if known is None or known[0] != text:
        known = _read[folder] = (text, _parsed(text))
    return known[1]


def _parsed(text: str) -> SiteStatus:
    try:
        status = json.loads(text)
        streams = {stream: StreamStatus.from_json(row) for stream, row in status.pop("streams", {}).items()}
        known = {name: status[name] for name in ("configuration", "committed_at_ns", "failed") if name in status}
        written_at = tuple(status["written_at"]) if "written_at" in status else None
        return SiteStatus(streams, **known, written_at=written_at)
    except (ValueError, AttributeError, TypeError):
        return SiteStatus(exists=False)


def write_status(folder: Path, status: SiteStatus) -> None:
    """Replace a site's status, written now."""
    _write(folder, replace(status, written_at=(times.monotonic(), times.boot_id())))


def outdate_status(folder: Path) -> None:
    """Mark the status of a state that was replaced or changed as `is_outdated`; its positions remain until the next run."""
    if (status := read_status(folder)).exists:
        _write(folder, replace(status, written_at=None))


def _write(folder: Path, status: SiteStatus) -> None:
    content = asdict(status)
    del content["exists"]
    if status.written_at is None:
        del content["written_at"]
    _store(folder, "status", content)


def note_closed_state(folder: Path) -> None:
    """Record the size and time of the state's file after a run has closed it."""
    # Without it, the next run opens the state.
    with contextlib.suppress(OSError, RunError):
        _store(folder, "closed", _state_stamp(folder))


def is_state_untouched(folder: Path) -> bool:
    """Return whether the state's file is as the last run has closed it."""
    home, site = control.place_of(folder)
    closed = control.query(home, "SELECT closed FROM site_status WHERE site = ?", site)
    try:
        return closed == [(json.dumps(_state_stamp(folder)),)]
    except OSError:
        return False


def _store(folder: Path, column: Literal["status", "closed"], content: object) -> None:
    home, site = control.place_of(folder)
    statement = f"""
        INSERT INTO site_status (site, {column}) VALUES (?, ?) ON CONFLICT DO UPDATE SET {column} = excluded.{column}
        """
    control.change(home, statement, site, json.dumps(content), durable=False)


def _state_stamp(folder: Path) -> list[int]:
    stat = (folder / _STATE_FILE).stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]


def record_idle_poll(folder: Path) -> None:
    """Record that a poll of a site found no work: no run records this for an idle site."""
    _touch(folder / _IDLE_POLL)


def last_idle_poll(folder: Path) -> float:
    """Return the time of the last idle poll in unix seconds, or 0."""
    return _touched_at(folder / _IDLE_POLL)


def record_alive(folder: Path) -> None:
    """Record that the process of a site, or of the due work, makes progress, and which of its threads fail."""
    file, failing = folder / _ALIVE, failing_threads()
    _touch(file)
    with contextlib.suppress(OSError):
        if failing or file.stat().st_size:
            file.write_text(json.dumps(failing))


def failing_elsewhere(folder: Path) -> dict[str, Failure]:
    """Return the failing threads at the last progress of a process, by name."""
    try:
        failing = json.loads((folder / _ALIVE).read_text() or "{}")
        return {name: Failure(float(since), str(problem)) for name, (since, problem) in failing.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def last_alive(folder: Path) -> float:
    """Return the time of the last progress of a process in unix seconds, or 0."""
    return _touched_at(folder / _ALIVE)


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.touch(mode=0o600)


def _touched_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def streams_without_error(home: Path, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the entries' streams that have no error in their site's status."""
    return tuple(
        entry.stream for entry in entries if not read_status(home / "sites" / entry.name).of(entry.stream).last_error
    )
