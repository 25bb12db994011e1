"""The decision whether a site needs a run, as pure functions of a tick's observations. Add a reason of a stream here, one of a
whole site in `observing.find_work`.

The rules are level-triggered: they compare a stream's position (in its status) with its source's stream info. They need no
memory between ticks, so a lost tick, a failed run or a restarted daemon makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from sr_assets.adapters.state.status_file import StreamStatus
    from sr_assets.settings import SensorSettings

_SECOND_NS: Final = 1_000_000_000
_LONGEST_PAUSE_SECONDS: Final = 300.0


class Decision(NamedTuple):
    """The reason why a site or stream needs a run; if it needs none, `reason` is None and `skip` explains why."""

    reason: str | None
    skip: str = ""


#: The decision on a site whose streams are all caught up, neither paused nor waiting after an error.
CAUGHT_UP: Final = Decision(None, "caught up")


@dataclass(frozen=True, slots=True)
class SourceNow:
    """The state of a source now; times are in unix ns.

    `watermark_ns` is the watermark that a run would commit if it started now. `unread_seconds` is how long the first unread
    message has waited, or None if there is none or no limit is configured.
    """

    created_ns: int
    first_sequence: int
    last_sequence: int
    watermark_ns: int | None = None
    unread_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EntryRules:
    """Differences between kinds of entries for the sensor.

    `starts_empty`: the first run does not wait for a message. `deadline_passed`: the reason to run after a deadline.
    `pause_stops_reading`: a paused stream is not read either.
    """

    starts_empty: bool
    deadline_passed: str
    pause_stops_reading: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """Inputs to the decision about one stream.

    `committed_at_ns` is the servers' time of the site's last commit, `age_seconds` its age, or None if unknown. `deliverable`:
    a stream now accepts the subject of the advisories.
    """

    status: StreamStatus
    source: SourceNow
    rules: EntryRules
    paused: bool = False
    deliverable: bool = False
    committed_at_ns: int = 0
    age_seconds: float | None = None


def decide(observed: Observed, sensor: SensorSettings) -> Decision:
    """Decide whether a stream needs a run: to read it, to drain its copy queue, to publish its outbox, or to show a pause.

    An error in reading does not stop draining the queue, and an error in copying does not stop reading.
    """
    decision = _decide_work(observed, sensor)
    status, paused = observed.status, observed.paused
    if decision.reason is None and status.begun and status.paused != paused:
        return Decision(f"copying was {'paused' if paused else 'resumed'}")
    return decision


def _decide_work(observed: Observed, sensor: SensorSettings) -> Decision:
    status, paused = observed.status, observed.paused
    if paused and observed.rules.pause_stops_reading:
        return Decision(None, "paused")
    read_wait = wait_after_error(observed, status.last_error, status.last_error_since_ns, sensor)
    copy_wait = wait_after_error(observed, status.copy_error, status.copy_error_since_ns, sensor)
    deliverable = status.unpublished > 0 and observed.deliverable
    refused = f"{status.unpublished} advisories were refused"
    refused_wait = wait_after_error(observed, refused, status.refused_since_ns, sensor)
    reasons = (
        (reason_to_read(status, observed.source, sensor, observed.rules), read_wait),
        (
            f"{status.queued} copies are queued" if status.queued > 0 else None,
            "copying is paused" if paused else copy_wait,
        ),
        (f"{status.unpublished} advisories can be delivered" if deliverable else None, read_wait or refused_wait),
    )
    waits = dict.fromkeys(wait for reason, wait in reasons if reason is not None and wait is not None)
    for reason, wait in reasons:
        if reason is not None and wait is None:
            return Decision(reason)
    return Decision(None, "; ".join(waits))


def unread_messages(status: StreamStatus, source: SourceNow) -> int:
    """Return how many sequences a stream is behind; negative if the source ends before the position."""
    return source.last_sequence + 1 - max(status.next_sequence, source.first_sequence)


def reason_to_read(status: StreamStatus, source: SourceNow, sensor: SensorSettings, rules: EntryRules) -> str | None:
    """Return why a stream must be read or swept, or None if it is caught up."""
    if not status.begun:
        # A run of an empty feed would compete with the sites that write its first message.
        return "first run" if rules.starts_empty or source.last_sequence else None
    if status.created_ns != source.created_ns:
        return "the source was recreated"
    if status.next_sequence > source.last_sequence + 1 and status.seen_messages:
        return "the source ends before the position"
    behind = unread_messages(status, source)
    if behind >= sensor.lag_messages:
        return f"{behind} messages behind"
    if (
        behind > 0
        and sensor.lag_ns
        and source.unread_seconds is not None
        and source.unread_seconds * _SECOND_NS >= sensor.lag_ns
    ):
        return f"{behind} messages behind for {sensor.lag_ns // _SECOND_NS} s"
    if status.next_deadline_ns is not None and status.next_deadline_ns < (source.watermark_ns or 0):
        return rules.deadline_passed
    return None


def wait_after_error(observed: Observed, error: str | None, since_ns: int | None, sensor: SensorSettings) -> str | None:
    """Return why a retry must wait, or None if it is due.

    The pause is as long as the error has lasted, at least a sensor interval and at most five minutes. It starts at the last
    commit.
    """
    if error is None or since_ns is None or observed.age_seconds is None:
        return None
    lasted = (observed.committed_at_ns - since_ns) / _SECOND_NS
    pause = min(max(lasted, sensor.interval_ns / _SECOND_NS), _LONGEST_PAUSE_SECONDS)
    waits = pause - observed.age_seconds
    return f"{error} (retry in {waits:.0f} s)" if waits > 0 else None
