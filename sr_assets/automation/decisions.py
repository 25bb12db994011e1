"""Whether a site needs a run: pure decisions on what was observed.

Here: the records of what a tick observed, and the rules on them. Add a reason to run here. Not here: asking servers,
files or clocks (`observing`).

The rules are level-triggered: they compare a stream's position (`status.json`) with its source's stream info. Nothing is
remembered between ticks, so a lost tick, a failed run or a restarted daemon changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import SensorSettings

_SECOND_NS: Final = 1_000_000_000
_LONGEST_PAUSE_SECONDS: Final = 300.0


class Decision(NamedTuple):
    """Why a site, or a stream of it, needs a run; without a need `reason` is None and `skip` has the explanation."""

    reason: str | None
    skip: str = ""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Where a stream stood when its site's last run committed, from `status.json`; times are in unix ns.

    `queued` copies are decided and not in the target yet. `last_error` kept the stream from being read, `copy_error` kept
    the queue from being drained.
    """

    created_ns: int = 0
    next_sequence: int = 0
    seen_messages: int = 0
    watermark_ns: int | None = None
    next_deadline_ns: int | None = None
    unpublished: int = 0
    queued: int = 0
    last_error: str | None = None
    last_error_since_ns: int | None = None
    copy_error: str | None = None
    copy_error_since_ns: int | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Read a stream's part of `status.json`; an earlier version of us may have left out a key."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})

    @property
    def begun(self) -> bool:
        """Whether there is a position."""
        return self.created_ns != 0


@dataclass(frozen=True, slots=True)
class SourceNow:
    """The state of a source now; times are in unix ns.

    `watermark_ns` is what a run that began now would commit, `unread_seconds` how long the first unread message has
    waited: None when there is none, or when no limit is configured for it.
    """

    created_ns: int
    first_sequence: int
    last_sequence: int
    watermark_ns: int | None = None
    unread_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EntryRules:
    """How entries differ for the sensor.

    `begins_empty`: a first run makes sense before there is a message. `deadline_passed` is the reason when a deadline
    has passed. `copies_what_it_reads`: what is paused is not read either.
    """

    begins_empty: bool
    deadline_passed: str
    copies_what_it_reads: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a decision about one stream goes by.

    `committed_at_ns` is the servers' time when the site's last run committed, `age_seconds` how long ago that was: None
    when it is not known. `deliverable`: a stream takes the subject of its advisories now.
    """

    status: StreamStatus
    source: SourceNow
    rules: EntryRules
    paused: bool = False
    deliverable: bool = False
    committed_at_ns: int = 0
    age_seconds: float | None = None


def decide(observed: Observed, sensor: SensorSettings) -> Decision:
    """Decide whether a stream needs a run: to be read, for its copy queue, or for its outbox.

    What keeps it from being read does not keep its queue from being drained, nor the other way round.
    """
    status, paused = observed.status, observed.paused
    if paused and observed.rules.copies_what_it_reads:
        return Decision(None, "paused")
    read_wait = wait_after_error(observed, status.last_error, status.last_error_since_ns, sensor)
    copy_wait = wait_after_error(observed, status.copy_error, status.copy_error_since_ns, sensor)
    reasons = (
        (reason_to_read(status, observed.source, sensor, observed.rules), read_wait),
        (reason_to_copy(status), "copying is paused" if paused else copy_wait),
        (reason_to_publish(status, deliverable=observed.deliverable), read_wait),
    )
    waits = dict.fromkeys(wait for reason, wait in reasons if reason is not None and wait is not None)
    for reason, wait in reasons:
        if reason is not None and wait is None:
            return Decision(reason)
    return Decision(None, "; ".join(waits))


def unread_messages(status: StreamStatus, source: SourceNow) -> int:
    """Return how many sequences a stream is behind; negative when the source ends before the position."""
    return source.last_sequence + 1 - max(status.next_sequence, source.first_sequence)


def reason_to_read(status: StreamStatus, source: SourceNow, sensor: SensorSettings, rules: EntryRules) -> str | None:
    """Return why a stream has to be read or swept; None when it is caught up."""
    if not status.begun:
        # A feed without a message would only compete with the sites that are about to write the first one.
        return "first run" if rules.begins_empty or source.last_sequence else None
    if status.created_ns != source.created_ns:
        return "the source was made again"
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


def reason_to_copy(status: StreamStatus) -> str | None:
    """Return why the copy queue has to be drained: whether the stream is caught up does not matter."""
    return f"{status.queued} copies are queued" if status.queued > 0 else None


def reason_to_publish(status: StreamStatus, *, deliverable: bool) -> str | None:
    """Return why the outbox has to be published: it waits, and a stream takes its subject now."""
    return f"{status.unpublished} advisories can be delivered" if status.unpublished and deliverable else None


def wait_after_error(observed: Observed, error: str | None, since_ns: int | None, sensor: SensorSettings) -> str | None:
    """Return why not to try again yet; None when it may be tried.

    After an error the pause is as long as the error has lasted, at least a sensor interval, at most five minutes; it
    begins when the last run committed.
    """
    if error is None or since_ns is None or observed.age_seconds is None:
        return None
    lasted = (observed.committed_at_ns - since_ns) / _SECOND_NS
    pause = min(max(lasted, sensor.interval_ns / _SECOND_NS), _LONGEST_PAUSE_SECONDS)
    waits = pause - observed.age_seconds
    return f"{error} (tried again in {waits:.0f} s)" if waits > 0 else None
